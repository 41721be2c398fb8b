"""Detects answers that repeat the same tokens without end."""

from __future__ import annotations

import numpy as np

_LONGEST_STRETCH = 256  # tokens


class RepetitionGuard:
    """Watches one sequence.

    A sequence repeats with period n while every token equals the token n positions earlier. One
    counter for each n is enough, so a token costs one comparison of two short arrays.
    limit: number of repeated tokens in a row at which the sequence should end.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._latest = np.full(_LONGEST_STRETCH, -1, dtype=np.int64)  # the newest token first
        self._repeated = np.zeros(_LONGEST_STRETCH, dtype=np.int64)

    def repeats(self, token: int) -> bool:
        """Add a token; returns whether the last `limit` tokens repeat those before them."""
        self._repeated = np.where(self._latest == token, self._repeated + 1, 0)
        self._latest[1:] = self._latest[:-1]
        self._latest[0] = token
        return bool(self._repeated.max() >= self._limit)
