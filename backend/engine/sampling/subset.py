"""A subset of a batch's rows: extracts their values from an array, and writes them back."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


class Subset:
    """Some rows of a batch of `size` rows; an empty subset is false."""

    def __init__(self, rows: Sequence[int], size: int) -> None:
        self.rows = list(rows)
        self._index = None if len(self.rows) == size else mx.array(self.rows, dtype=mx.int32)

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def whole(self) -> bool:
        """Whether the subset has every row of the batch."""
        return self._index is None

    def of(self, values: mx.array) -> mx.array:
        """Return the subset's rows of an array whose first axis is the batch."""
        return values if self._index is None else values[self._index]

    def put(self, values: mx.array, own: mx.array) -> mx.array:
        """Return an array with the subset's rows replaced by `own`.

        values: the array, which may be changed itself.
        """
        if self._index is None:
            return own
        values[self._index] = own
        return values
