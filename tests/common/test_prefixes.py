"""The common prefix is the longest one that both have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.prefixes import common_prefix

SHORT = st.lists(st.integers(0, 1), max_size=6)


@given(SHORT, SHORT)
def test_it_is_the_longest_common_prefix(left: list[int], right: list[int]) -> None:
    lengths = range(min(len(left), len(right)) + 1)
    assert common_prefix(left, right) == max(n for n in lengths if left[:n] == right[:n])


def test_characters_count_like_tokens() -> None:
    assert common_prefix("straße", "strand") == 4
