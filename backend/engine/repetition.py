"""Notices an answer that repeats the same stretch of tokens without end."""

from __future__ import annotations

import numpy as np

_LONGEST_STRETCH = 256  # tokens


class RepetitionGuard:
    """Watches one sequence. limit: tokens of nothing but repetition after which it is over.

    A stretch of n tokens repeats as long as every token equals the one n places before it, so one
    counter for each n is enough: a token costs one comparison of two short arrays.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._latest = np.full(_LONGEST_STRETCH, -1, dtype=np.int64)  # the newest token first
        self._repeated = np.zeros(_LONGEST_STRETCH, dtype=np.int64)

    def repeats(self, token: int) -> bool:
        """Take the next token; whether the last `limit` tokens repeated what came before them."""
        self._repeated = np.where(self._latest == token, self._repeated + 1, 0)
        self._latest[1:] = self._latest[:-1]
        self._latest[0] = token
        return bool(self._repeated.max() >= self._limit)
