"""Decides which waiting rows run together. Pure arithmetic over lengths.

Rows are padded to the longest of their step, so a step takes rows of about the same length. It is
bounded in padded tokens, which sets how long it lasts, and in the bytes that attention needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_SHORTEST = 16


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """Bytes that a forward pass needs besides the weights, by the shape of the model.

    heads: attention scores are a square of the length for each. hidden: values per token and
    layer that are alive at once, as a multiple of the hidden size. itemsize: bytes of a value.
    """

    heads: int
    hidden: int
    itemsize: int

    def of(self, rows: int, length: int) -> int:
        """For that many rows, each padded to `length` tokens."""
        scores = 2 * self.heads * length * length
        return rows * (scores + self.hidden * length) * self.itemsize


def bucket_of(length: int) -> int:
    """The class of lengths that are run together: less than a third of a step is padding."""
    if length <= _SHORTEST:
        return _SHORTEST
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 else power


def rows_that_fit(lengths: Iterable[int], tokens: int, cost: ActivationCost, room: int) -> int:
    """How many of the rows, from the first on, make one step; always at least one.

    tokens: padded tokens of a step. room: bytes.
    """
    rows = longest = 0
    for length in lengths:
        wider = max(longest, length)
        if rows and ((rows + 1) * wider > tokens or cost.of(rows + 1, wider) > room):
            return rows
        rows, longest = rows + 1, wider
    return rows
