"""Snapshots are taken where prompts diverge, and the copied ones are denser near the end."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.planning.checkpoint_positions import LEAST_STORED, checkpoint_positions


def _whole(length: int) -> int:
    return length


@pytest.mark.parametrize("most", [4, 8, 16])
@pytest.mark.parametrize("length", [600, 2000])
def test_the_copied_positions_cover_the_text_and_are_denser_near_its_end(
    most: int, length: int
) -> None:
    """Conversations are usually edited near their end, and sometimes at their beginning."""
    known = range(7, length, 20)
    ahead, copied = checkpoint_positions([], known, length, length, most, _whole)
    assert (ahead, len(copied)) == (set(), most)
    ends = [0, *sorted(copied), length]
    gaps = [after - before for before, after in pairwise(ends)]
    assert max(gaps) <= 2.5 * length / most
    assert sum(gaps[: most // 2]) >= sum(gaps[most // 2 + 1 :])


LENGTHS = st.integers(1, 3000)


@given(
    st.lists(LENGTHS, max_size=6),
    st.none() | st.lists(LENGTHS, max_size=20),
    LENGTHS,
    LENGTHS,
    st.integers(1, 12),
)
def test_the_positions_are_few_useful_and_apart(
    expected: list[int], known: list[int] | None, filled: int, last: int, most: int
) -> None:
    ahead, copied = checkpoint_positions(expected, known, filled, last, most, _whole)
    assert len(ahead) + len(copied) <= most
    assert all(max(filled + 1, LEAST_STORED) <= at <= last for at in ahead)
    assert all(at <= filled and (known is None or at in known) for at in copied)
    assert all(after - before > 8 for before, after in pairwise(sorted(ahead)))


def test_the_likeliest_positions_come_first() -> None:
    assert checkpoint_positions([300, 90], None, 0, 1000, 1, _whole) == ({300}, set())


def test_a_position_in_an_image_is_moved_before_it() -> None:
    ahead, _ = checkpoint_positions([50], None, 0, 100, 4, lambda at: min(at, 40))
    assert ahead == {40}
