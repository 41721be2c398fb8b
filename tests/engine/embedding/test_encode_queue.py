"""Which rows run together, which requests are answered, and what a fault or a cancel affects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from backend.engine.embedding.encode_queue import ActivationCost, EncodeQueue
from backend.engine.embedding.encoding import Encoded, Piece
from backend.engine.engine_state import Gauges
from backend.engine.errors import Cancelled, EngineFailed, ExpertsUnreadable, Overloaded
from backend.engine.planning.pace import Pace


class Encoder:
    """An encode queue over a model whose result is the sum of a row's ids.

    An id of -1 raises; one of -2 takes more memory than there is; one of -3 has no weights.
    """

    def __init__(self, room: int = 1 << 30, most: int = 1 << 30) -> None:
        self.most = most  # rows for which there is memory
        self.steps: list[list[int]] = []
        self.outcomes: dict[int, Any] = {}
        self.faults: list[str] = []
        self.queue = EncodeQueue(
            self._run,
            ActivationCost(1, 16, 4),
            Pace(64, 250),
            room,
            self.outcomes.__setitem__,
            self._report,
            Gauges(),
        )

    def _run(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        self.steps.append([len(piece.ids) for piece in pieces])
        if any(-1 in piece.ids for piece in pieces):
            raise ValueError("secret")
        if any(-3 in piece.ids for piece in pieces):
            raise ExpertsUnreadable("check the disk")
        if len(self.steps[-1]) > self.most or any(-2 in piece.ids for piece in pieces):
            raise RuntimeError("[malloc] Unable to allocate 123456 bytes.")
        sums = [float(sum(piece.ids)) for piece in pieces]
        return [np.array([np.nan if total == 13 else total]) for total in sums]

    def _report(self, where: str, fault: BaseException) -> None:
        self.faults.append(where)

    def ask(self, ticket: int, *rows: list[int]) -> None:
        self.queue.submit(ticket, [Piece(row, [0] * len(row)) for row in rows])

    def finish(self) -> None:
        while self.queue.busy:
            self.queue.step(running=False)

    def sums(self, ticket: int) -> list[float]:
        answer = self.outcomes[ticket]
        assert isinstance(answer, Encoded)
        return [float(output[0]) for output in answer.outputs]


def test_requests_share_steps_and_get_their_own_rows_in_order() -> None:
    encoder = Encoder()
    encoder.ask(1, [1] * 40, [2] * 3, [3] * 40)
    encoder.ask(2, [4] * 4)
    encoder.ask(3, [5] * 5)
    encoder.finish()
    assert [3, 4, 5] in encoder.steps
    assert encoder.sums(1) == [40, 6, 120]
    assert (encoder.sums(2), encoder.sums(3)) == ([16], [25])


def test_the_oldest_row_is_never_overtaken() -> None:
    encoder = Encoder()
    encoder.ask(1, [1] * 60)
    for ticket in range(2, 40):
        encoder.ask(ticket, [1])
    encoder.queue.step(running=True)
    assert encoder.steps[0] == [60]


def test_a_text_does_not_wait_for_all_texts_of_an_earlier_request() -> None:
    for length in (40, 50, 3):  # in the same bucket, and in others
        encoder = Encoder()
        encoder.ask(1, *[[1] * 50] * 1000)
        for _ in range(3):
            encoder.queue.step(running=True)
        encoder.ask(2, [2] * length)
        steps = len(encoder.steps)
        while 2 not in encoder.outcomes:
            encoder.queue.step(running=True)
        assert len(encoder.steps) - steps <= 8


def test_texts_that_keep_coming_do_not_hold_up_an_earlier_request() -> None:
    encoder = Encoder()
    encoder.ask(1, *[[1] * 50] * 20)
    tickets = range(2, 1000)
    for ticket in tickets:
        if 1 in encoder.outcomes:
            break
        encoder.ask(ticket, [2] * 3)
        encoder.queue.step(running=True)
    assert ticket < 60
    assert encoder.sums(1) == [50.0] * 20


def test_a_cancelled_request_is_not_computed_further() -> None:
    encoder = Encoder()
    encoder.ask(1, *[[1] * 50] * 8)
    encoder.ask(2, [1] * 50)
    encoder.queue.step(running=False)
    encoder.queue.cancel(1)
    encoder.finish()
    assert set(encoder.outcomes) == {2}
    assert sum(map(len, encoder.steps)) < 9


def test_requests_around_a_cancelled_one_get_their_own_rows() -> None:
    encoder = Encoder()
    for ticket in range(1, 6):
        encoder.ask(ticket, *[[ticket] * 3] * 2)
    for ticket in (2, 4, 5):
        encoder.queue.cancel(ticket)
    assert encoder.queue.busy
    encoder.finish()
    assert (encoder.sums(1), encoder.sums(3)) == ([3, 3], [9, 9])
    assert encoder.outcomes.keys() == {1, 3}
    assert sum(map(len, encoder.steps)) == 4


def test_a_fault_ends_only_the_requests_of_its_step() -> None:
    encoder = Encoder()
    encoder.ask(1, [-1, 1], [1] * 60)
    encoder.ask(2, [2, 2])
    encoder.ask(3, [3] * 60)
    encoder.finish()
    assert isinstance(encoder.outcomes[1], EngineFailed)
    assert "secret" not in str(encoder.outcomes[1])
    assert isinstance(encoder.outcomes[2], EngineFailed)
    assert encoder.sums(3) == [180]
    assert encoder.faults == ["encoding"]


def test_a_fault_that_has_a_message_for_the_client_is_passed_on() -> None:
    encoder = Encoder()
    encoder.ask(1, [-3, 1])
    encoder.finish()
    assert str(encoder.outcomes[1]) == "check the disk"
    assert encoder.faults == []


def test_rows_for_which_memory_was_short_run_once_more_each_alone() -> None:
    encoder = Encoder(most=1)
    encoder.ask(1, [1, 1], [2, 2])
    encoder.ask(2, [3, 3])
    encoder.ask(3, [4] * 60)
    encoder.finish()
    assert encoder.steps[:4] == [[2, 2, 2], [2], [2], [2]]
    assert (encoder.sums(1), encoder.sums(2), encoder.sums(3)) == ([2, 4], [6], [240])
    assert encoder.faults == []


def test_a_row_that_gets_no_memory_ends_its_request_with_figures() -> None:
    encoder = Encoder()
    encoder.ask(1, [-2] * 20, [1] * 60)
    encoder.ask(2, [3] * 20)
    encoder.finish()
    assert isinstance(encoder.outcomes[1], Overloaded)
    assert "a text of 20 tokens needs about 0 MiB" in str(encoder.outcomes[1])
    assert encoder.sums(2) == [60]
    assert encoder.steps == [[20, 20], [20], [20]]


def test_a_row_with_nan_results_fails_only_its_request() -> None:
    encoder = Encoder()
    encoder.ask(1, [13], [13], [1] * 60)
    encoder.ask(2, [7])
    encoder.finish()
    assert isinstance(encoder.outcomes[1], EngineFailed)
    assert encoder.sums(2) == [7]


def test_a_row_that_does_not_fit_into_memory_is_refused_at_once() -> None:
    encoder = Encoder(room=100_000)
    encoder.ask(1, [1] * 1000)
    encoder.ask(2, [1] * 10)
    encoder.finish()
    assert isinstance(encoder.outcomes[1], Overloaded)
    assert "a text of 1000 tokens needs" in str(encoder.outcomes[1])
    assert encoder.sums(2) == [10]


def test_all_requests_end_when_the_model_is_unloaded() -> None:
    encoder = Encoder()
    encoder.ask(1, [1], [1] * 60)
    encoder.ask(2, [1])
    encoder.queue.cancel_all(Cancelled("the model was unloaded"))
    assert not encoder.queue.busy
    assert {ticket: type(what) for ticket, what in encoder.outcomes.items()} == {
        1: Cancelled,
        2: Cancelled,
    }
