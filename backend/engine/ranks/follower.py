"""Runs a rank other than 0, which loads its part of a model and carries out the plans of rank 0.

Such a rank makes no decisions and receives no requests. Its main thread is the engine thread.
Another thread reads the connection to rank 0, because a collective of MLX may block the main thread
for ever. If the connection ends, the process ends, because MLX can form only one group per process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NoReturn

import mlx.core as mx

from backend.engine import device
from backend.engine.blas_threads import blas_threads
from backend.engine.caching import kv
from backend.engine.errors import Cancelled, EngineError, EngineFailed, naming
from backend.engine.executing.executor import Executor
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.executing.scoring import Scoring
from backend.engine.load_request import LoadRequest
from backend.engine.loading.load_order import LoadOrder
from backend.engine.loading.loader import find
from backend.engine.loading.recurrent_layers import use_chunks
from backend.engine.loading.row_masks import fit_row_masks
from backend.engine.loading.stages import Stages, at_once
from backend.engine.loading.traits import measure
from backend.engine.loading.weights import load_model
from backend.engine.model import EngineModel
from backend.engine.ranks import wire
from backend.engine.ranks.fingerprint import versions
from backend.engine.ranks.link import Link, LinkLost, after, connect
from backend.engine.ranks.rank_info import Member, RankInfo, Value, until_ended
from backend.engine.ranks.sharding import broadcast, join_group
from backend.engine.ranks.wire import Add, Message, Plain, Signal, Step, name_of
from backend.engine.request import GenerationRequest, TokenPrompt
from backend.engine.token_text import ByteStream

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.25
_REFUSED_SECONDS = 2.0  # pause after a refusal; it is longer because rank 0 logs each refusal
_REPORT_SECONDS = 5.0
_TIDY_EVERY = 512  # steps after which freed buffers are returned to the system
STOPPED, FAILED = 0, 1


def follow(info: RankInfo, token: str, end: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """Carry out the messages of rank 0 until rank 0 ends.

    end: ends the process with an exit code, even if threads are blocked.
    """
    link = _connected(info, token)
    follower = _Follower(info, link)

    def listen() -> None:
        try:
            while (message := link.receive()) is not Signal.STOP:
                follower.receive(message, lambda: end(FAILED))
            end(STOPPED)
        except LinkLost as loss:
            _log.error("%s %s, so %s ends", info.name(0), loss, info.name(info.rank))
        except Exception as fault:
            _log.error("%s failed", info.name(info.rank), exc_info=fault)
        end(FAILED)

    threading.Thread(target=listen, name="rank-link", daemon=True).start()
    try:
        follower.run()
    except Exception as fault:
        why = str(fault) if isinstance(fault, EngineError) else f"{type(fault).__name__}: {fault}"
        _log.error("%s failed", info.name(info.rank), exc_info=fault)
        with contextlib.suppress(LinkLost):
            link.send(wire.Failed(why))
    end(FAILED)


def _connected(info: RankInfo, token: str) -> Link:
    reported = time.monotonic() - _REPORT_SECONDS
    host, port = info.control
    while True:
        try:
            join = wire.Join(info.rank, info.size, versions())
            return connect(info.control, token, join, info.timeout)
        except (OSError, LinkLost) as fault:
            refused = isinstance(fault, LinkLost)
            why = str(fault) if refused else "cannot be reached"
            if time.monotonic() - reported >= _REPORT_SECONDS:
                reported = time.monotonic()
                _log.warning("rank 0 at %s:%d %s; trying again", host, port, why)
        time.sleep(_REFUSED_SECONDS if refused else _RETRY_SECONDS)


class _Follower:
    def __init__(self, info: RankInfo, link: Link) -> None:
        self._info = info
        self._link = link
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._model: _FollowedModel | None = None
        self._number = 0  # the number of the latest load
        # Loads that still run on this rank, by number. An event is set when rank 0 ends its load.
        self._loads: dict[int, threading.Event] = {}

    def run(self) -> None:
        while True:
            self._obey(self._inbox.get())

    def receive(self, message: Message, end: Callable[[], None]) -> None:
        """Handle a message on the thread that reads the connection.

        A load that rank 0 has ended stops before its next stage. If the load does not stop in time,
        because it is waiting in a collective for rank 0, the process ends.
        """
        match message:
            case Signal.JOIN:
                self._link.timeout = max(self._link.timeout, self._info.timeout)
            case wire.LoadShard(number, timeout=timeout):
                self._link.timeout = timeout
                self._loads[number] = threading.Event()
            case wire.Abandon(number) if number in self._loads:
                self._loads[number].set()
                after(self._link.timeout, lambda: end() if number in self._loads else None)
        self._inbox.put(message)

    def _obey(self, message: Message) -> None:
        match message:
            case Signal.JOIN:
                join_group(self._info)
            case wire.LoadShard():
                self._load(message)
            case Signal.DROP:
                self._drop()
            case wire.Abandon(number):
                if number == self._number:
                    self._drop()
            case wire.Agreed():
                pass  # for a load that has already ended on this rank
            case Signal.OPEN | wire.Add() | wire.Step() | Signal.CLEAR | wire.Plain():
                assert self._model is not None, "rank 0 uses only what is loaded"
                self._model.obey(message)
            case other:
                raise LinkLost(f"sent {name_of(other)}, which this rank does not expect")

    def _load(self, order: wire.LoadShard) -> None:
        self._drop()
        self._number = order.number
        abandoned = self._loads[order.number]

        def agree(value: Value) -> Sequence[Value]:
            self._link.send(wire.LoadReport(order.number, value))
            while True:
                match self._inbox.get():
                    case wire.Agreed(number, values) if number == order.number:
                        return values
                    case wire.Abandon(number) if number == order.number:
                        raise _ended()

        request, member = LoadRequest(**order.request), Member(self._info, agree)
        try:
            with ExitStack() as held:
                found = find(request, order.number, abandoned, held)
                stages = until_ended(
                    _load_part(found, member), lambda: _ended() if abandoned.is_set() else None
                )
                with naming(found.checkpoint.name):
                    self._model = at_once(stages)
        except Cancelled:
            self._drop()
        except EngineError as refusal:
            self._drop()
            self._link.send(wire.LoadReport(order.number, refusal=str(refusal)))
        finally:
            del self._loads[order.number]

    def _drop(self) -> None:
        if self._model is not None:
            self._model = None
            device.release_memory()


def _ended() -> Cancelled:
    return Cancelled("the load has ended on another rank")


def _load_part(order: LoadOrder, member: Member) -> Stages[_FollowedModel]:
    """Load this rank's part of a model. All stages run on one thread."""
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
    return _FollowedModel(
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


class _FollowedModel:
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
                device.return_buffers()
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
            device.return_buffers()
