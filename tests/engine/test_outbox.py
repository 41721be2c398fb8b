"""Text may be delayed for a moment; all other events are delivered immediately."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.errors import Cancelled
from backend.engine.events import Finished, GrowingText, TextDelta, Undelivered, Usage
from backend.engine.outbox import FOR_ALL, PER_ANSWER, Outbox, Publication

INTERVAL = 0.01
TEXT = TextDelta("a", Usage())  # as it is delivered
END = Finished("stop", Usage())


def text(piece: str = "a", tokens: int = 0) -> GrowingText:
    return GrowingText(lambda: Usage(completion_tokens=tokens), [(piece, tokens)], [])


class Moment:
    def __init__(self) -> None:
        self.now = 100.0
        self.delivered: list[list[Publication]] = []
        self.outbox = Outbox(self.delivered.append, lambda: self.now)
        self.outbox.interval = INTERVAL

    def flush(
        self, after: float = 0.0, *, everything: bool = False, until_next: float = 0.0
    ) -> int:
        """Returns how many publications were delivered."""
        self.now += after
        before = len(self.delivered)
        self.outbox.flush(everything=everything, until_next=until_next)
        return sum(map(len, self.delivered[before:]))

    def publish(self, *what: tuple[int, Undelivered]) -> None:
        for ticket, event in what:
            self.outbox.publish(ticket, event)


def test_first_text_is_delivered_at_once_and_later_text_collects() -> None:
    moment = Moment()
    moment.publish((1, text()))
    assert moment.flush() == 1
    moment.publish((1, text()))
    assert moment.flush(0.004) == 0
    moment.publish((1, text()))
    assert moment.flush(0.007) == 2


@pytest.mark.parametrize(("step", "steps"), [(0.9, 1), (0.6, 1), (0.4, 2), (1.5, 1)])
def test_text_never_collects_for_longer_than_the_interval_or_a_step(
    step: float, steps: int
) -> None:
    """step: the duration of a step, as a share of the interval."""
    moment = Moment()
    moment.publish((1, text()))
    moment.flush()
    waited = 0
    for _ in range(8):
        moment.publish((1, text()))
        waited += 1
        if moment.flush(step * INTERVAL, until_next=step * INTERVAL):
            assert waited == steps
            waited = 0


@pytest.mark.parametrize(("answers", "seconds"), [(16, 16 * PER_ANSWER), (64, FOR_ALL)])
def test_with_more_answers_text_collects_for_longer(answers: int, seconds: float) -> None:
    moment = Moment()
    moment.publish(*((ticket, text()) for ticket in range(answers)))
    assert moment.flush() == answers
    moment.publish(*((ticket, text()) for ticket in range(answers)))
    assert moment.flush(0.9 * seconds) == 0
    moment.publish(*((ticket, text()) for ticket in range(answers)))
    assert moment.flush(0.2 * seconds) == 2 * answers
    moment.publish(*((ticket, END) for ticket in range(1, answers)))
    moment.flush()
    moment.publish((0, text()))
    assert moment.flush(1.1 * INTERVAL) == 1


def test_urgent_events_are_delivered_with_waiting_text_in_order() -> None:
    for urgent in (END, Cancelled("gone")):
        moment = Moment()
        moment.publish((1, text()), (2, text()))
        moment.flush()
        moment.publish((1, text()))
        assert moment.flush(0.001) == 0
        moment.outbox.publish(2, urgent)
        assert moment.flush(0.001) == 2
        assert moment.delivered[-1] == [(1, TEXT), (2, urgent)]
        moment.publish((1, text()), (3, text()))
        assert moment.flush(0.001) == 2


def test_after_a_long_step_nothing_waits() -> None:
    moment = Moment()
    moment.publish((1, text()))
    moment.flush()
    moment.publish((1, text()))
    assert moment.flush(0.001, everything=True) == 1


def test_without_an_interval_every_token_is_delivered_separately() -> None:
    moment = Moment()
    moment.outbox.interval = 0.0
    for _ in range(5):
        moment.publish((1, text()))
        assert moment.flush() == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(["text", "end"]), st.floats(0, 0.02)),
        max_size=40,
    )
)
def test_every_event_is_delivered_once_in_order_and_in_time(
    steps: list[tuple[int, str, float]],
) -> None:
    moment = Moment()
    published: list[Publication] = []
    oldest: float | None = None
    for ticket, kind, after in steps:
        published.append((ticket, TEXT if kind == "text" else END))
        moment.publish((ticket, text() if kind == "text" else END))
        oldest = moment.now if oldest is None else oldest
        if moment.flush(after):
            oldest = None
        assert oldest is None or moment.now - oldest < INTERVAL
        assert kind == "text" or oldest is None
    moment.flush(everything=True)
    assert [one for batch in moment.delivered for one in batch] == published
