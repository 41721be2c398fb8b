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
        return self._index is None

    def of(self, values: mx.array) -> mx.array:
        return values if self._index is None else values[self._index]

    def put(self, values: mx.array, own: mx.array) -> mx.array:
        """Return `values`, which may be changed, with the subset's rows replaced by `own`."""
        if self._index is None:
            return own
        values[self._index] = own
        return values
