"""The common prefix is the longest one that both have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.prefixes import common_prefix, position_of

TOKENS = st.lists(st.integers(0, 1), max_size=6)
TEXTS = st.text("aß", max_size=6)


@given(st.tuples(TOKENS, TOKENS) | st.tuples(TEXTS, TEXTS))
def test_it_is_the_longest_common_prefix(pair: tuple[Sequence[object], Sequence[object]]) -> None:
    left, right = pair
    lengths = range(min(len(left), len(right)) + 1)
    assert common_prefix(left, right) == max(n for n in lengths if left[:n] == right[:n])


@pytest.mark.parametrize("right", [[1, 2, 4], (1, 2, 4), range(1, 3)])
def test_sequences_of_other_types_are_compared_by_their_items(right: Sequence[int]) -> None:
    assert common_prefix((1, 2, 3), right) == 2


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
    st.lists(st.integers(0, 2)),
    st.integers(0, 9),
)
def test_the_first_occurrence_is_found(wanted: list[int], sequence: list[int], start: int) -> None:
    size = len(wanted)
    ends = range(start + size, len(sequence) + 1)
    found = [end - size for end in ends if sequence[end - size : end] == wanted]
    assert position_of(wanted, sequence, start) == (found[0] if found else -1)
    assert position_of(tuple(wanted), tuple(sequence), start) == (found[0] if found else -1)
