"""What counts as a standstill, and what a heartbeat says about the running step."""

from __future__ import annotations

import mmap
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.heartbeat import BYTES, Heartbeat, Standstill, StepLimits, StepTimeout, counted

LOOKS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 5)), max_size=40)


@given(LOOKS)
def test_only_the_time_of_the_latest_checks_without_progress_counts(
    looks: list[tuple[int, bool, int]],
) -> None:
    standstill, now = Standstill(), 100.0
    for at, (number, due, passed) in enumerate(looks):
        now += passed
        same, back = 0.0, at
        while back > 0 and looks[back][1] and looks[back - 1][0] == looks[back][0]:
            same += min(looks[back][2], 1.5)
            back -= 1
        assert standstill.check(number, now, due=due) == same


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


BEGIN = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([None, 0.0, 2.5]))


@given(st.lists(BEGIN | st.just("tick") | st.just("rest"), max_size=60), st.booleans())
def test_steps_that_repeat_have_the_limits_of_all_steps(
    events: list[tuple[str, float | None] | Literal["tick", "rest"]], compiles: bool
) -> None:
    heartbeat, timeout = Heartbeat.fresh(), StepTimeout(3, 500, compiles)
    heartbeat.limits, expected = StepLimits(timeout), StepLimits(timeout)
    count = 0
    for event in events:
        if event == "tick":
            heartbeat.tick()
        elif event == "rest":
            heartbeat.rest()
            expected.end(heartbeat.ticks)
        else:
            step, seconds = event
            heartbeat.begin(step, expected=seconds)
            count += 1
            limit = expected.begin(step, seconds, heartbeat.ticks)
            assert (heartbeat.step, heartbeat.limit) == (step, limit)
            assert heartbeat.running
            assert heartbeat.steps == count


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
