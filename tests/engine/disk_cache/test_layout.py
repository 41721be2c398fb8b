"""Numbers of a layer that would make MLX read out of bounds, or describe another cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from backend.engine.disk_cache.layout import StoredLayer, learn_layout, pack, refusal
from tests.engine.disk_cache.rows import KINDS, filled, model_of, words

TOKENS = 100


def why(kind: str, change: Callable[[tuple[int, ...]], tuple[int, ...]], tokens: int) -> str:
    """Why a cache with changed numbers is refused."""
    layout = learn_layout(model_of(kind))
    packed = pack(filled(model_of(kind), words(TOKENS)), copy=False)
    assert layout is not None
    assert packed is not None
    first, *rest = packed.layers
    changed: list[StoredLayer] = [
        dataclasses.replace(first, scalars=change(first.scalars)),
        *rest,
    ]
    return refusal(layout, changed, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_the_model_is_accepted(kind: str) -> None:
    assert why(kind, lambda numbers: numbers, TOKENS) == ""


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"recurrent"}))
def test_a_row_of_another_length_is_refused(kind: str) -> None:
    assert why(kind, lambda numbers: numbers, TOKENS - 1)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("full", 0), ("quantised", 0), ("quantised", 1), ("quantised", 2)]
    + [("window", place) for place in range(4)],
)
def test_any_other_number_is_refused(kind: str, place: int) -> None:
    """Length, group size and bits; length, kept tokens, size and position of a window."""

    def change(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return (*numbers[:place], numbers[place] + 50, *numbers[place + 1 :])

    assert why(kind, change, TOKENS)
