"""The common prefix is the longest one that both have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.prefixes import common_prefix

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
