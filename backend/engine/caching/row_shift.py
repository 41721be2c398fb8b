"""The difference between a row's positions and its token count, stored like one more layer's cache.

A model with multimodal RoPE gives an image fewer positions than tokens, so the text after the image
is at position `tokens + shift`. mlx-vlm stores the shift in the model, where all rows would share
it. Here the shift is the last item in a row's list of caches, so it stays with the row when the row
joins or leaves a batch, or becomes a cached prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


class RowShift:
    """The shifts of some rows, in positions; 0 for a row without media."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers or (0,)
        self.shifts = mx.array(self._numbers)

    @property
    def shift(self) -> int:
        """The shift of the only row."""
        (number,) = self._numbers
        return number

    @shift.setter
    def shift(self, number: int) -> None:
        self._numbers, self.shifts = (number,), mx.array([number])

    def gathered(self, members: Sequence[tuple[Any, int]], rows: int = 0) -> RowShift:  # noqa: ARG002
        return RowShift(*(layer._numbers[row] for layer, row in members))

    rearranged = gathered

    def extracted(self, row: int) -> RowShift:
        return RowShift(self._numbers[row])

    @property
    def state(self) -> tuple[Any, ...]:
        return ()

    @property
    def nbytes(self) -> int:
        return 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        """Do nothing: a row that starts from a shorter prefix gets another shift."""
        return tokens
