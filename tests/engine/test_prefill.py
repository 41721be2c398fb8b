"""The pace of prefill."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.engine.prefill import SMALLEST_STEP, Pace


def test_a_slow_model_gets_short_steps_while_streams_run() -> None:
    pace = Pace(512, stall_ms=250)
    for _ in range(20):
        pace.measured(64, 64 * 0.005)
    assert pace.tokens(running=True) == 32
    assert pace.tokens(running=False) == 192


def test_a_fast_model_gets_the_configured_most() -> None:
    pace = Pace(512, stall_ms=250)
    for _ in range(20):
        pace.measured(64, 64 * 1e-5)
    assert pace.tokens(running=True) == 512


def test_a_handful_of_tokens_teaches_nothing() -> None:
    pace = Pace(512, stall_ms=250)
    pace.measured(64, 64 * 1e-5)
    pace.measured(1, 0.5)
    assert pace.tokens(running=True) == 512


@given(st.floats(1e-6, 1.0), st.integers(1, 8192), st.booleans())
def test_a_step_is_never_empty_and_never_above_the_most(
    seconds: float, most: int, running: bool
) -> None:
    pace = Pace(most, stall_ms=250)
    pace.measured(64, 64 * seconds)
    assert SMALLEST_STEP <= pace.tokens(running=running) <= max(most, SMALLEST_STEP)
