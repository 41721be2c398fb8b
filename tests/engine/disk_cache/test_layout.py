"""Numbers of a layer that would make MLX read out of bounds, or describe another cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backend.engine.disk_cache.layout import fits, learn_layout, pack
from tests.engine.disk_cache.rows import KINDS, filled, model_of, words

TOKENS = 100


def accepted(kind: str, change: Callable[[list[int]], list[int]], tokens: int) -> bool:
    """Whether a cache with changed numbers is accepted."""
    layout = learn_layout(model_of(kind))
    arrays, numbers = pack(filled(model_of(kind), words(TOKENS)), copy=False)
    assert layout is not None
    count = len(layout[0].numbers)
    return fits(layout, arrays, [*change(numbers[:count]), *numbers[count:]], tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_the_model_is_accepted(kind: str) -> None:
    assert accepted(kind, lambda numbers: numbers, TOKENS)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"recurrent"}))
def test_a_row_of_another_length_is_refused(kind: str) -> None:
    assert not accepted(kind, lambda numbers: numbers, TOKENS - 1)


@pytest.mark.parametrize(
    ("kind", "place"),
    [*(("quantised", place) for place in range(3)), ("full", 0), ("window", 0), ("window", 1)],
)
def test_any_other_number_is_refused(kind: str, place: int) -> None:
    """Length, group size and bits; length and size of a window."""

    def change(numbers: list[int]) -> list[int]:
        return [*numbers[:place], numbers[place] + 50, *numbers[place + 1 :]]

    assert not accepted(kind, change, TOKENS)
