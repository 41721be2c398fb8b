"""The pace of prefill and the places where a prompt is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.engine.prefill import SMALLEST_STEP, Pace, chunk_end


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


@given(st.integers(1, 500), st.integers(1, 100), st.sets(st.integers(1, 499), max_size=3))
def test_chunks_cover_the_prompt_but_its_last_token_and_stop_at_checkpoints(
    length: int, budget: int, wanted: set[int]
) -> None:
    checkpoints = tuple(sorted(place for place in wanted if place < length))
    filled, stops = 0, []
    while filled < length - 1:
        end = chunk_end(filled, length, budget, checkpoints)
        assert filled < end <= filled + budget
        filled = end
        stops.append(end)
    assert filled == length - 1
    assert set(checkpoints) <= set(stops)
