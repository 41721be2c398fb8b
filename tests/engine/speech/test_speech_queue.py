"""Turns of transcriptions: fair, bounded by memory, and ended by a cancel after one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from backend.engine.engine_state import Gauges
from backend.engine.errors import Cancelled, EngineFailed, Overloaded
from backend.engine.events import Finished
from backend.engine.speech.speech_queue import SpeechQueue
from backend.engine.speech.transcript import Segment, Speech, Transcribed

ROOM = 100


def counting(speech: Speech) -> Iterator[Transcribed | None]:
    """As many windows as there are samples."""
    for at in range(len(speech.samples)):
        yield Transcribed((Segment(at, at + 1, f" {at}", (at,)),), "en", at + 1)


class Queue:
    """A queue whose events are recorded."""

    def __init__(self, transcribe: Any = counting, needs: int = 10, slots: int = 4) -> None:
        self.events: list[tuple[int, Any]] = []
        self.faults: list[BaseException] = []
        self.gauges = Gauges()
        self.queue = SpeechQueue(
            transcribe,
            lambda _: needs,
            slots,
            ROOM,
            lambda ticket, what: self.events.append((ticket, what)),
            lambda _, fault: self.faults.append(fault),
            self.gauges,
        )

    def submit(self, ticket: int, windows: int) -> None:
        self.queue.submit(ticket, Speech(np.zeros(windows, np.float32)))

    def run(self) -> list[int]:
        """The tickets in the order of their turns."""
        while self.queue.busy:
            self.queue.step(running=False)
        return [ticket for ticket, what in self.events if isinstance(what, Transcribed)]


def test_recordings_take_turns() -> None:
    queue = Queue()
    queue.submit(1, 4)
    queue.submit(2, 2)
    assert queue.run() == [1, 2, 1, 2, 1, 1]
    ends = [(ticket, what.usage.completion_tokens) for ticket, what in queue.events
            if isinstance(what, Finished)]  # fmt: skip
    assert ends == [(2, 2), (1, 4)]
    assert queue.gauges.running == 0
    assert queue.gauges.tokens_generated == 6


@pytest.mark.parametrize(("needs", "slots"), [(60, 4), (10, 1)])
def test_a_recording_waits_without_memory_or_slot(needs: int, slots: int) -> None:
    queue = Queue(needs=needs, slots=slots)
    queue.submit(1, 3)
    queue.submit(2, 3)
    assert queue.run() == [1, 1, 1, 2, 2, 2]


def test_a_recording_that_never_fits_is_refused() -> None:
    queue = Queue(needs=ROOM + 1)
    queue.submit(1, 3)
    assert not queue.queue.busy
    assert isinstance(queue.events[0][1], Overloaded)


def test_a_cancelled_recording_ends_and_says_nothing_more() -> None:
    closed: list[bool] = []

    def watched(speech: Speech) -> Iterator[Transcribed | None]:
        try:
            yield from counting(speech)
        finally:
            closed.append(True)

    queue = Queue(watched)
    queue.submit(1, 5)
    queue.submit(2, 2)
    queue.queue.step(running=False)
    queue.queue.cancel(1)
    assert closed == [True]
    assert queue.run() == [1, 2, 2]


def test_all_end_with_the_model() -> None:
    queue = Queue()
    queue.submit(1, 5)
    queue.submit(2, 5)
    queue.queue.cancel_all(Cancelled("the model was unloaded"))
    assert not queue.queue.busy
    assert [(ticket, type(what)) for ticket, what in queue.events] == [
        (1, Cancelled),
        (2, Cancelled),
    ]


@pytest.mark.parametrize(
    ("fault", "error"),
    [(ValueError("no"), EngineFailed), (MemoryError(), Overloaded)],
)
def test_a_fault_ends_its_own_recording_only(fault: Exception, error: type[Exception]) -> None:
    def failing(speech: Speech) -> Iterator[Transcribed | None]:
        if len(speech.samples) == 3:
            raise fault
        yield from counting(speech)

    queue = Queue(failing)
    queue.submit(1, 3)
    queue.submit(2, 2)
    assert queue.run() == [2, 2]
    assert queue.faults == [fault]
    assert [type(what) for ticket, what in queue.events if ticket == 1] == [error]
