"""The difference between a row's positions and its token count, stored like one more layer's cache.

A model with multimodal RoPE gives an image fewer positions than tokens, so the text after it is at
position `tokens + shift`. mlx-vlm keeps the shift on the model, where all
rows would share it. Here it is the last item in a row's list of caches, so it stays with the row
when that joins or leaves a batch, or is stored as an entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx


class _Weightless:
    """The cache interface, for a cache without keys and values."""

    @property
    def state(self) -> tuple[Any, ...]:
        return ()

    @property
    def nbytes(self) -> int:
        return 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        """Do nothing: a row that starts from a shorter prefix gets its own shift."""
        return tokens

    def prepare(self, **padding: Any) -> None:
        """Do nothing: the shift is the same for all later tokens."""

    def finalize(self) -> None:
        """Do nothing: `prepare` has done nothing."""


class RowShift(_Weightless):
    """The shift of one row, in positions; 0 for a row without media."""

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
