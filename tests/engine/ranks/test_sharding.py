"""How the layers of a pipeline are divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.ranks.sharding import split_of


@pytest.mark.parametrize(
    ("layers", "memories", "split"),
    [
        (4, [10, 10], [2, 2]),
        (5, [100, 95], [3, 2]),
        (5, [95, 100], [3, 2]),
        (24, [64, 128], [8, 16]),
        (3, [1, 1000, 1], [1, 1, 1]),
        (28, [128, 64, 64], [14, 7, 7]),
    ],
)
def test_layers_are_divided_by_memory(layers: int, memories: list[int], split: list[int]) -> None:
    assert split_of(layers, memories) == split


@given(st.lists(st.integers(1, 1 << 40), min_size=2, max_size=8), st.integers(0, 100))
def test_every_layer_has_a_rank_and_every_rank_a_layer(memories: list[int], more: int) -> None:
    split = split_of(len(memories) + more, memories)
    assert sum(split) == len(memories) + more
    assert min(split) >= 1
    assert len(split) == len(memories)
