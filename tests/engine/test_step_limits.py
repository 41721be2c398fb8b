"""How long a step may take before it counts as hung."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from backend.engine.heartbeat import StepLimits, StepTimeout

CPU, GPU = StepTimeout(60, 3600), StepTimeout(60, 600, compiles=True)


def after(timeout: StepTimeout, *ticks: int) -> StepLimits:
    """The limits after decode steps that took so many ticks."""
    limits, tick = StepLimits(timeout), 0
    for length in ticks:
        limits.begin("decode step of 1 sequence", None, tick)
        tick += length
        limits.end(tick)
    return limits


def decode(limits: StepLimits, expected: float | None = None) -> int:
    return limits.begin("decode step of 1 sequence", expected, 10_000)


def test_a_limit_is_twenty_times_the_longest_step_of_its_kind() -> None:
    assert decode(after(CPU, 0, 5, 1)) == 100
    assert decode(after(CPU, 0)) == 60
    assert decode(after(CPU, 1000)) == 3600


def test_a_limit_is_twenty_times_the_prediction() -> None:
    assert decode(after(CPU), expected=3.01) == 61
    assert decode(after(CPU, 5), expected=3.01) == 100
    assert decode(after(CPU, 1), expected=math.inf) == 3600


def test_before_anything_is_known_a_step_may_take_the_most() -> None:
    assert decode(after(CPU)) == 3600
    assert after(CPU, 1).begin("prefill of 8 tokens", None, 0) == 3600


def test_on_a_gpu_the_first_step_of_a_kind_may_compile() -> None:
    assert decode(after(GPU), expected=0.01) == 600
    assert decode(after(GPU, 50), expected=0.01) == 60
    assert decode(after(GPU, 50, 4), expected=0.01) == 80


def test_steps_of_other_sizes_are_of_the_same_kind() -> None:
    limits = StepLimits(GPU)
    limits.begin("prefill of 8 tokens", 0.1, 0)
    assert limits.begin("prefill of 512 tokens", 0.1, 1) == 60
    assert limits.begin("decode step of 2 sequences", 0.1, 2) == 600


def test_time_without_work_is_of_no_step() -> None:
    limits = after(CPU, 1)
    assert limits.begin("decode step of 1 sequence", None, 500) == 60
    limits.end(501)
    assert limits.begin("decode step of 1 sequence", None, 9000) == 60


@given(
    st.integers(0, 5000),
    st.lists(st.tuples(st.sampled_from("ab"), st.none() | st.floats(0), st.integers(0, 9000))),
)
def test_a_number_that_the_user_set_is_the_limit_of_all_steps(
    seconds: int, steps: list[tuple[str, float | None, int]]
) -> None:
    limits, tick = StepLimits(StepTimeout(seconds, seconds)), 0
    for kind, expected, ticks in steps:
        assert limits.begin(kind, expected, tick) == seconds
        tick += ticks
