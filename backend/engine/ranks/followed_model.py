"""Loads a rank's part of a model, and carries out the plans of rank 0 with it."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import mlx.core as mx

from backend.engine import device
from backend.engine.blas_threads import blas_threads
from backend.engine.caching import kv
from backend.engine.errors import EngineError, EngineFailed, naming
from backend.engine.executing.executor import Executor
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.executing.scoring import Scoring
from backend.engine.load_request import LoadRequest
from backend.engine.loading.load_order import LoadOrder
from backend.engine.loading.loader import find
from backend.engine.loading.recurrent_layers import use_chunks
from backend.engine.loading.row_masks import fit_row_masks
from backend.engine.loading.stages import Stages
from backend.engine.loading.traits import measure
from backend.engine.loading.weights import load_model
from backend.engine.mlx_lm_import import import_mlx_lm
from backend.engine.model import EngineModel
from backend.engine.ranks.group import broadcast
from backend.engine.ranks.member import Member
from backend.engine.ranks.wire import Add, Plain, Signal, Step
from backend.engine.request import GenerationRequest, TokenPrompt
from backend.engine.token_text import ByteStream

_TIDY_EVERY = 512  # steps after which freed buffers are returned to the system


class FollowedModel:
    """A rank's part of a model, which computes the same passes as rank 0 in the same order."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._executor = Executor(model)
        self._steps = 0

    def obey(self, message: Signal | Add | Step | Plain) -> None:
        """Carry out a message of rank 0. Raises EngineFailed."""
        match message:
            case Step():
                self._step(message)
            case Add():
                self._add(message)
            case Signal.OPEN:
                self._executor = Executor(self._model)
            case Signal.CLEAR:
                self._executor.clear()
                mx.clear_cache()
            case Plain(tokens):
                row = kv.new_row(self._model.model)
                mx.eval(self._model.model(mx.array([list(tokens)]), cache=row))

    def _add(self, add: Add) -> None:
        scoring = None
        if add.scores is not None:
            scoring = Scoring(add.scores, side_by_side=add.side_by_side)
        logprobs = 0 if add.prompt_logprobs else None
        request = GenerationRequest("", TokenPrompt(()), prompt_logprobs=logprobs)
        self._executor.add(
            ExecutorSequence(add.number, request, add.prompt, add.limit, scoring=scoring)
        )

    def _step(self, step: Step) -> None:
        executor = self._executor
        executor.launch(step.plan)
        executor.read()
        executor.settle(idle=not step.plan.decode)
        executor.take_early()
        failures, executor.failures = executor.failures, []
        for failure in failures:
            if not isinstance(failure.fault, EngineError):
                raise EngineFailed(
                    f"{failure.where}: {type(failure.fault).__name__}: {failure.fault}"
                ) from failure.fault
        self._steps += 1
        if not executor.sequences:
            executor.rest()
        if not executor.sequences or self._steps % _TIDY_EVERY == 0:
            mx.clear_cache()


def load_followed(
    request: LoadRequest, number: int, member: Member, cancelled: threading.Event
) -> Stages[FollowedModel]:
    """Load this rank's part of a model. All stages run on one thread.

    Raises the error of the load, even if the load has failed on another rank.

    number: the number of the load.
    member: exchanges values with the other ranks.
    cancelled: ends a download when set.
    """
    with ExitStack() as held:
        order = find(request, number, cancelled, held)
        with naming(order.checkpoint.name):
            return (yield from _load(order, member))


def _load(order: LoadOrder, member: Member) -> Stages[FollowedModel]:
    import_mlx_lm()
    here = device.detect()
    device.prepare(here)
    settings, request = order.settings, order.request
    loaded = yield from load_model(
        order.checkpoint, settings, here, dtype=request.dtype, member=member
    )
    fit_row_masks(loaded.model)
    use_chunks()
    limit = device.memory_limit(here, settings)
    traits = yield from measure(loaded, order.cache_kind, limit, member)
    device.apply(device.memory_plan(here, settings, loaded.weights_bytes))
    return FollowedModel(
        EngineModel(
            model=loaded.model,
            head=traits.head,
            vocabulary=traits.vocabulary,
            end_tokens=frozenset(),
            new_text=lambda _: ByteStream(lambda _: b"", strip_first_space=False),
            cost=traits.cost,
            slots=settings.parallel,
            weights_bytes=loaded.weights_bytes,
            memory_limit=limit,
            prompt_cache_bytes=0,
            max_cache_entries=0,
            prefill_chunk=0,
            stall_ms=0,
            trims=traits.trims,
            blas=blas_threads(loaded.matrix_bytes) if here.kind == "cpu" else None,
            broadcast=broadcast,
        )
    )
