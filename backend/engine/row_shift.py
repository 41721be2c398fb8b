"""How far a row's positions are from its count of tokens, carried like one more layer of its KV.

A model with multimodal RoPE gives an image fewer positions than tokens, so what follows the image
stands at `tokens + shift`. mlx-vlm keeps that number on the model, where rows would share it. Here
it lies at the end of a row's list of caches, and so goes wherever the row goes: into a batch and
out of it, into the prompt store and back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx


class _Weightless:
    """What a cache must be able to do, of one that holds no keys and values."""

    @property
    def state(self) -> tuple[Any, ...]:
        return ()

    @property
    def nbytes(self) -> int:
        return 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        """Nothing: a row that starts from a shorter prefix gets its own shift."""
        return tokens

    def prepare(self, **padding: Any) -> None:
        """Nothing: a shift is the same for all tokens to come."""

    def finalize(self) -> None:
        """Nothing."""


class RowShift(_Weightless):
    """The shift of one row, in positions; 0 for a row of text alone."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    @property
    def shifts(self) -> mx.array:
        return mx.array([self.shift])


class BatchShift(_Weightless):
    """The shifts of several rows, in their order."""

    def __init__(self, shifts: Iterable[int]) -> None:
        self._numbers = list(shifts)
        self.shifts = mx.array(self._numbers)

    def row(self, at: int) -> RowShift:
        return RowShift(self._numbers[at])
