"""The length of guesses grows on what can be guessed and costs little on what cannot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.engine.drafting.length import DraftLength


def play(
    length: DraftLength, at: int, tokens: int, *, right: bool, most: int = 8
) -> tuple[int, int]:
    """Passes of the model and guesses for so many tokens, of which all or none are guessed."""
    end, passes, guesses = at + tokens, 0, 0
    while at < end:
        count = length.allowed(at, most)
        passes, guesses = passes + 1, guesses + count
        if count:
            length.told(at, count, count if right else 0)
        at += 1 + (count if right else 0)
    return passes, guesses


def test_right_guesses_grow_to_the_most() -> None:
    length = DraftLength()
    assert play(length, 10, 900, right=True)[0] < 900 / 8
    assert length.allowed(1000, 8) == 8
    assert length.allowed(1000, 64) == 16, "a larger bound is approached, not jumped to"


def test_wrong_guesses_become_one_in_sixteen_tokens() -> None:
    assert play(DraftLength(), 10, 1600, right=False)[1] < 110


def test_text_that_can_be_guessed_is_found_again() -> None:
    length = DraftLength()
    play(length, 0, 1000, right=False)
    assert play(length, 1000, 100, right=True)[0] < 16 + 100 / 4


def test_what_held_says_how_far_to_guess() -> None:
    length = DraftLength()
    play(length, 0, 100, right=True)
    length.told(100, 8, 3)
    assert length.allowed(104, 8) == 4


def test_a_bound_of_the_caller_is_no_failure() -> None:
    length = DraftLength()
    play(length, 0, 100, right=True)
    before = length.allowed(100, 64)
    length.told(100, 1, 1)
    assert length.allowed(102, 64) == before


def test_nothing_to_propose_rests_soon_and_shortly() -> None:
    length = DraftLength()
    asked = 0
    for at in range(160):
        if length.ready(at):
            asked += 1
            length.nothing(at)
    assert 10 <= asked <= 20


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 1), st.booleans()), max_size=200))
def test_always_within_bounds_and_never_at_rest_for_long(
    story: list[tuple[int, float, bool]],
) -> None:
    length, at = DraftLength(), 0
    for most, share, empty in story:
        resting = 0
        while not length.ready(at):
            assert length.allowed(at, most) == 0
            at, resting = at + 1, resting + 1
        assert resting <= 16
        count = length.allowed(at, most)
        assert 1 <= count <= most
        if empty:
            length.nothing(at)
        else:
            length.told(at, count, round(count * share))
        at += 1
