"""Finds the row whose prefill another one can start from, so that a prompt is read once.

Requests that arrive together often begin alike: one prompt asked for several answers, or one
system prompt before several questions. While the first of them is being read, the others gain
more by waiting for their common part than by reading it beside it. Pure: only looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from backend.engine.prefill import SMALLEST_STEP
from backend.engine.row import Row


@dataclass(frozen=True, slots=True)
class Sibling:
    """A row in prefill that shares its first `length` tokens with a waiting one."""

    row: Row
    length: int

    @property
    def reached(self) -> bool:
        """Whether its KV holds the common part by now."""
        return self.row.filled >= self.length


def closest(row: Row, prefilling: Iterable[Row], held: int) -> Sibling | None:
    """The row that shares the most, if it is at least a step more than what is `held` already.

    The last token of either prompt does not count: it is never prefilled.
    """
    siblings = [
        Sibling(other, row.whole_media(_shared(row.key[:-1], other.key[:-1])))
        for other in prefilling
    ]
    best = max(siblings, key=lambda sibling: sibling.length, default=None)
    return best if best is not None and best.length >= held + SMALLEST_STEP else None


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(np.asarray(left[:length]) != np.asarray(right[:length]))
    return int(different[0]) if len(different) else length
