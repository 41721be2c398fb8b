"""What counts as a standstill, and what a heartbeat says about the running step."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.heartbeat import BYTES, Heartbeat, Standstill, counted
from backend.engine.step_limits import StepLimits, StepTimeout

LOOKS = st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40)


@given(LOOKS)
def test_the_count_is_of_the_latest_checks_without_progress(
    numbers: list[tuple[int, bool]],
) -> None:
    standstill = Standstill()
    for at, (number, due) in enumerate(numbers):
        same = 0
        while at - same > 0 and numbers[at - same][1] and numbers[at - same - 1][0] == number:
            same += 1
        assert standstill.check(number, due=due) == same


@given(st.lists(st.text(max_size=700), min_size=1, max_size=5))
def test_another_process_reads_what_was_written_last(steps: list[str]) -> None:
    heartbeat, memory = Heartbeat.fresh(), mmap.mmap(-1, BYTES)
    heartbeat.limits = StepLimits(StepTimeout(7, 7))
    heartbeat.move(memory)
    other = Heartbeat(memory)
    for count, step in enumerate(steps, 1):
        heartbeat.begin(step)
        assert (other.steps, other.running, other.limit) == (count, True, 7)
        name = other.step.removesuffix("\ufffd")
        assert step.partition("\0")[0].startswith(name)
        assert name or not step or step[0] == "\0"
    heartbeat.rest()
    assert (other.steps, other.running) == (len(steps), False)


@pytest.mark.parametrize(
    ("limit", "patient", "loads", "guarded"),
    [
        (5, False, False, True),
        (5, False, True, True),
        (5, True, False, True),
        (5, True, True, False),
        (0, False, False, False),
    ],
)
def test_loads_and_a_limit_of_zero_are_not_guarded(
    limit: int, patient: bool, loads: bool, guarded: bool
) -> None:
    heartbeat = Heartbeat.fresh()
    assert heartbeat.guarded
    heartbeat.limits, heartbeat.patient = StepLimits(StepTimeout(limit, limit)), patient
    heartbeat.begin("step", loads=loads)
    assert heartbeat.guarded is guarded


def test_counts_are_spelled() -> None:
    assert [counted(1, "token"), counted(2, "token")] == ["1 token", "2 tokens"]
