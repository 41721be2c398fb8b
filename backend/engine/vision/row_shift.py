"""How far a row's positions are from its count of tokens, carried like one more layer of its KV.

A model with multimodal RoPE gives an image fewer positions than tokens, so what follows the image
stands at `tokens + shift`. mlx-vlm keeps that number on the model, where rows would share it. Here
it lies at the end of a row's list of caches, and so goes wherever the row goes: into a batch and
out of it, into the prompt store and back.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """Nothing: a row that goes on from a shorter prefix is given its own shift."""
        return tokens


class RowShift(_Weightless):
    """The shift of one row, in positions; 0 for a row of text alone."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    @property
    def shifts(self) -> mx.array:
        return mx.array([self.shift])

    @classmethod
    def merge(cls, rows: Sequence[RowShift]) -> BatchShift:
        """A batch of the rows, in their order."""
        return BatchShift(row.shift for row in rows)


class BatchShift(_Weightless):
    """The shifts of the rows of a batch."""

    def __init__(self, shifts: Any) -> None:
        self._shifts: list[int] = list(shifts)
        self._array: mx.array | None = None

    @property
    def shifts(self) -> mx.array:
        if self._array is None:
            self._array = mx.array(self._shifts)
        return self._array

    def filter(self, rows: Sequence[int]) -> None:
        self._shifts, self._array = [self._shifts[row] for row in rows], None

    def extend(self, other: BatchShift) -> None:
        self._shifts, self._array = [*self._shifts, *other._shifts], None

    def extract(self, row: int) -> RowShift:
        return RowShift(self._shifts[row])
