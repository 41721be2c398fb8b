"""Texts to embed on the engine thread of a model that also generates, where memory is short."""

from __future__ import annotations

import queue
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any, cast

import numpy as np
import pytest

from backend.engine.commands import (
    Cancel,
    Command,
    Encode,
    Load,
    MeasureMemory,
    Stop,
    Submit,
)
from backend.engine.embedding import networks
from backend.engine.embedding.encode_queue import ActivationCost, EncodeQueue
from backend.engine.embedding.encoding import Encoded, Piece
from backend.engine.embedding.sentence_files import PoolingRule
from backend.engine.events import Finished, TextDelta
from backend.engine.model import EngineModel
from backend.engine.outbox import Publication
from backend.engine.planning import text_turn
from backend.engine.planning.pace import Pace
from backend.engine.request import GenerationRequest, RawPrompt
from backend.engine.served_model import ServedModel
from backend.engine.worker import Worker
from tests.engine.kv_models import kv_model, words
from tests.engine.rounds import MIB, alone, engine_model
from tests.polling import until

pytestmark = pytest.mark.usefixtures("each_order")
STREAM, TEXT, NEWCOMER = 1, 2, 3
_COST = ActivationCost(4, 1024, 4)


class Outcomes:
    """What the engine thread has published. order: the requests that are over, as they ended."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[Publication] | str] = queue.SimpleQueue()
        self.put = self._queue.put
        self.tokens: dict[int, int] = {}
        self.order: list[int] = []
        self.texts: dict[int, str] = {}
        self.vectors: dict[int, np.ndarray] = {}

    def take(self) -> None:
        """Wait for the next publications."""
        published = self._queue.get(timeout=60)
        assert not isinstance(published, str), published
        for ticket, what in published:
            match what:
                case TextDelta(text):
                    self.tokens[ticket] = self.tokens.get(ticket, 0) + 1
                    self.texts[ticket] = self.texts.get(ticket, "") + text
                case Finished():
                    self.order.append(ticket)
                case Encoded(outputs):
                    self.order.append(ticket)
                    self.vectors[ticket] = outputs[0]
                case _:
                    raise AssertionError(what)


@contextmanager
def serving(model: EngineModel, *, fails: int = 0) -> Iterator[tuple[Worker, Outcomes]]:
    """fails: how many passes over texts get no memory before one does."""
    outcomes = Outcomes()
    worker = Worker(outcomes.put, outcomes.put)
    worker.start()
    hidden = networks.text_states(model.model, {"model_type": "llama"})
    run = networks.passes(networks.embedder(hidden, PoolingRule(("mean",), False)), pad_token=0)
    pace = Pace(4096, 250)
    failing = iter(range(fails))

    def run_or_fail(pieces: Sequence[Piece]) -> list[np.ndarray]:
        if next(failing, None) is not None:
            raise RuntimeError("[malloc] Unable to allocate 123456 bytes.")
        return run(pieces)

    def load() -> Generator[str, None, Any]:
        yield from ()

        def new_encoder(*edges: Any) -> EncodeQueue:
            return EncodeQueue(run_or_fail, _COST, pace, model.memory_limit, *edges)

        served = cast(ServedModel, type("Served", (), {"epoch": 1}))
        return model, new_encoder, served

    loaded = Load(cast(Any, load()), Event())
    worker.send(loaded)
    loaded.done.result(60)
    try:
        yield worker, outcomes
    finally:
        worker.send(Stop())
        assert worker.join(60)


def _submit(ticket: int, prompt: list[int], limit: int) -> Command:
    wanted = GenerationRequest(str(ticket), RawPrompt(""), ignore_eos=True)
    return Submit(1, ticket, wanted, prompt, limit)


def _longest_text(room: int) -> Encode:
    """A text that needs all of the memory."""
    length = 1
    while _COST.of(1, length + 1) <= room:
        length += 1
    return Encode(1, TEXT, [Piece(words(length, 1))])


def test_a_text_that_needs_all_memory_stops_neither_the_stream_nor_newcomers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text gets its turn before the stream ends, however long earlier passes took."""
    monkeypatch.setattr(text_turn, "_COST_FACTOR", 0.0)
    monkeypatch.setattr(text_turn, "_LEAST_WAIT", 0.05)
    model = engine_model(kv_model("attention"), memory_limit=4 * MIB, prompt_cache_bytes=0)
    with serving(model) as (worker, outcomes):
        worker.send(_submit(STREAM, words(900, 2), 5000))
        while STREAM not in outcomes.tokens:
            outcomes.take()
        worker.send(_longest_text(model.memory_limit))
        worker.send(_submit(NEWCOMER, words(20, 3), 5))
        while len(outcomes.order) < 2:
            outcomes.take()
        assert set(outcomes.order) == {TEXT, NEWCOMER}
        tokens = outcomes.tokens[STREAM]
        while outcomes.tokens[STREAM] < tokens + 20:
            outcomes.take()
        worker.send(Cancel(STREAM))
    assert outcomes.texts[NEWCOMER] == alone(model, words(20, 3), 5, ignore_eos=True).text
    expected = alone(model, words(900, 2), outcomes.tokens[STREAM], ignore_eos=True).text
    assert outcomes.texts[STREAM] == expected
    (vector,) = _vectors_alone(model)
    np.testing.assert_allclose(outcomes.vectors[TEXT], vector, rtol=1e-4, atol=1e-5)


def test_earlier_prompts_give_way_to_a_text_that_gets_no_memory() -> None:
    model = engine_model(kv_model("attention"))
    with serving(model, fails=1) as (worker, outcomes):
        worker.send(_submit(NEWCOMER, words(20, 3), 5))
        while NEWCOMER not in outcomes.order:
            outcomes.take()
        until(lambda: _stored_bytes(worker) > 0)
        worker.send(Encode(1, TEXT, [Piece(words(7, 1))]))
        while TEXT not in outcomes.order:
            outcomes.take()
        assert _stored_bytes(worker) == 0


def _stored_bytes(worker: Worker) -> int:
    measured = MeasureMemory()
    worker.send(measured)
    return measured.done.result(60)["prompt_cache"]


def _vectors_alone(model: EngineModel) -> list[np.ndarray]:
    hidden = networks.text_states(model.model, {"model_type": "llama"})
    run = networks.passes(networks.embedder(hidden, PoolingRule(("mean",), False)), pad_token=0)
    encode = _longest_text(model.memory_limit)
    assert isinstance(encode.pieces, list)
    return run(encode.pieces)
