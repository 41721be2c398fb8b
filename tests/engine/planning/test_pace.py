"""How many prompt tokens a prefill step takes, given measured times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.planning.pace import SMALLEST_STEP, Pace
from backend.engine.planning.plan import Prefill, Score, StepPlan


def test_a_slow_model_gets_short_steps_while_streams_run() -> None:
    pace = Pace(512, stall_ms=250)
    for _ in range(10):
        for tokens in (32, 64, 128):
            pace.measured(tokens, tokens * 0.005)
    assert pace.tokens(running=True) == 48
    assert pace.tokens(running=False) == 200


def test_a_fast_model_gets_the_configured_maximum() -> None:
    pace = Pace(512, stall_ms=250)
    for _ in range(20):
        pace.measured(64, 64 * 1e-5)
    assert pace.tokens(running=True) == 512


def test_the_duration_of_a_step_is_that_of_all_its_passes() -> None:
    pace = Pace(512, stall_ms=250)
    for tokens in (16, 64, 256) * 10:
        pace.measured(tokens, 0.1 + tokens * 0.001)
    prefill = ((Prefill(1, 0, 60), Prefill(2, 0, 100)), (Prefill(3, 5, 55),))
    plan = StepPlan(1, decode={1: 4, 2: 2}, draft={2: 3}, prefill=prefill, score=(Score(4, 30),))
    passes = (200, 50, 4, 8, 30)
    assert pace.step_seconds(plan) == pytest.approx(sum(map(pace.seconds, passes)))
    assert pace.step_seconds(StepPlan(2)) == 0.0


def test_if_even_a_few_tokens_take_long_steps_are_small_and_still_measured() -> None:
    """Far into a long prompt, on a CPU, 32 tokens would delay a stream for 0.8 seconds."""
    pace = Pace(512, stall_ms=250)
    for _ in range(20):
        tokens = pace.tokens(running=True, behind=3600)
        pace.measured(tokens, tokens * 0.026, behind=3600)
    assert pace.tokens(running=True, behind=3600) == 8
    for _ in range(20):
        tokens = pace.tokens(running=True, behind=3600)
        pace.measured(tokens, tokens * 0.005, behind=3600)
    assert pace.tokens(running=True, behind=3600) >= 32


def test_a_handful_of_tokens_is_not_measured() -> None:
    pace = Pace(512, stall_ms=250)
    pace.measured(64, 64 * 1e-5)
    pace.measured(1, 0.5)
    assert pace.tokens(running=True) == 512


@given(st.floats(1e-6, 1.0), st.integers(1, 8192), st.booleans())
def test_a_step_is_never_empty_and_never_above_the_maximum(
    seconds: float, most: int, running: bool
) -> None:
    pace = Pace(most, stall_ms=250)
    pace.measured(64, 64 * seconds)
    assert SMALLEST_STEP <= pace.tokens(running=running) <= max(most, SMALLEST_STEP)


@pytest.mark.parametrize(("level", "slope"), [(1e-4, 1e-8), (1e-4, 0.0), (2e-3, 1e-7)])
def test_short_and_very_long_prompts_take_turns_within_the_stall_limit(
    level: float, slope: float
) -> None:
    dice, pace = random.Random(1), Pace(100_000, stall_ms=250)
    taken: list[float] = []
    for course in range(200):
        total, behind = dice.choice([100, 100, 500, 60_000]), 0
        while behind < total:
            most = pace.tokens(running=True, behind=behind)
            tokens = min(most, total - behind)
            seconds = tokens * (level + slope * behind) * dice.uniform(0.9, 1.1)
            if course > 5 and most > SMALLEST_STEP:
                taken.append(seconds / 0.25)
            pace.measured(tokens, seconds, behind)
            behind += tokens
    assert max(taken) < 1.3


def test_a_slower_machine_is_noticed_at_any_length() -> None:
    pace = Pace(100_000, stall_ms=250)
    for slower in (1, 8):
        for at, behind in enumerate((0, 500, 40_000) * 10):
            tokens = (64, 128, 512, 256)[at % 4]
            pace.measured(tokens, tokens * slower * (1e-4 + 1e-8 * behind), behind)
        for behind in (0, 40_000):
            expected = 0.25 / (slower * (1e-4 + 1e-8 * behind))
            assert abs(pace.tokens(running=True, behind=behind) - expected) < 32 + 0.1 * expected


@pytest.mark.parametrize(("fixed", "each"), [(0.008, 1 / 60_000), (0.02, 1 / 900), (0.05, 0.005)])
def test_the_fixed_part_of_a_pass_is_learned(fixed: float, each: float) -> None:
    dice, pace = random.Random(2), Pace(2048, stall_ms=250)
    for _ in range(40):
        tokens = dice.choice([16, 64, 300, 1000])
        pace.measured(tokens, (fixed + tokens * each) * dice.uniform(0.97, 1.03))
    assert pace.fixed_seconds == pytest.approx(fixed, rel=0.2)
    for tokens in (16, 300, 1000):
        assert pace.seconds(tokens) == pytest.approx(fixed + tokens * each, rel=0.15)
    assert pace.width == pytest.approx(fixed / each, rel=0.3)


def test_until_lengths_differ_a_pass_is_assumed_to_cost_a_few_tokens_more() -> None:
    pace = Pace(512, stall_ms=250)
    for _ in range(5):
        pace.measured(64, 0.096)
    assert pace.width == 32
    assert pace.fixed_seconds == pytest.approx(0.032, rel=0.05)


@pytest.mark.parametrize("slower", [1.0, 20.0])
def test_passes_that_compile_kernels_do_not_count_for_long(slower: float) -> None:
    """As in the warm-up: first uses of a shape take long, and then two passes do not."""
    pace = Pace(2048, stall_ms=250)
    for tokens, factor in ((8, slower), (16, slower), (64, slower), (64, 1), (2048, 1)):
        pace.measured(tokens, factor * (0.02 + tokens / 10_000))
    assert pace.seconds(1000) == pytest.approx(0.12, rel=0.5)
    for _ in range(10):
        pace.measured(500, 0.07)
    pace.measured(500, 3.0)
    assert pace.seconds(500) == pytest.approx(0.07, rel=0.2)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4096), st.floats(0, 1e4, allow_subnormal=False), st.integers(0, 200_000)
        ),
        max_size=30,
    )
)
def test_whatever_was_measured_predictions_are_finite_and_grow_with_the_tokens(
    passes: list[tuple[int, float, int]],
) -> None:
    pace = Pace(2048, stall_ms=250)
    for tokens, seconds, behind in passes:
        pace.measured(tokens, seconds, behind)
    for behind in (0, 1000, 100_000):
        assert SMALLEST_STEP <= pace.tokens(running=True, behind=behind) <= 2048
        assert 0 < pace.seconds(8, behind) <= pace.seconds(64, behind) < float("inf")
    assert 1 <= pace.width <= 2048
