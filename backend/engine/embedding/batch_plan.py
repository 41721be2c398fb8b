"""Decides, from the lengths of waiting rows, which rows run in the same step.

Rows are padded to the longest row of their step, so a step should have rows of similar length. Two
limits apply to a step: the number of tokens with padding, which determines its duration, and the
number of bytes that attention needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_SHORTEST = 16


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """The bytes that a forward pass needs in addition to the weights."""

    heads: int  # attention heads, each with length² scores
    hidden: int  # values per token that are in memory at the same time, besides the scores
    itemsize: int  # bytes per value

    def of(self, rows: int, length: int) -> int:
        """Return the bytes for `rows` rows, each padded to `length` tokens."""
        scores = 2 * self.heads * length * length
        return rows * (scores + self.hidden * length) * self.itemsize


def bucket_of(length: int) -> int:
    """Return the bucket of a length. If rows are of one bucket, less than a third is padding."""
    if length <= _SHORTEST:
        return _SHORTEST
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 else power


def rows_that_fit(lengths: Iterable[int], tokens: int, cost: ActivationCost, budget: int) -> int:
    """Return how many rows, starting with the first, fit into one step; always at least one.

    tokens: maximum number of tokens, including padding.
    budget: maximum number of bytes.
    """
    rows = longest = 0
    for length in lengths:
        wider = max(longest, length)
        if rows and ((rows + 1) * wider > tokens or cost.of(rows + 1, wider) > budget):
            return rows
        rows, longest = rows + 1, wider
    return rows
