"""How far to guess, learnt from what became of the guesses before."""

from __future__ import annotations

FIRST = 2  # guesses at the start of a row
_SHORTEST_REST = 4
_LONGEST_REST = 16
_WRONG = 2  # attempts in a row whose first guess was wrong, after which to rest
_EMPTY = 4  # the same for attempts that had nothing to propose, which cost less


class DraftLength:
    """Longer after guesses that all held, as long as what held otherwise; a rest after failures.

    A rest is counted in tokens of the row, so plain steps in between need not be reported. Rests
    double while attempts go on failing: text that cannot be guessed then pays for one short
    attempt in 16 tokens. `at` is always the row's length in tokens at the attempt.
    """

    def __init__(self) -> None:
        self._length = FIRST
        self._wrong = self._empty = 0
        self._rest = 0
        self._resume = 0

    def ready(self, at: int) -> bool:
        """Whether it pays to try."""
        return at >= self._resume

    def allowed(self, at: int, most: int) -> int:
        """Guesses to make now, 0 to `most`."""
        return min(self._length, most) if self.ready(at) else 0

    def nothing(self, at: int) -> None:
        """An attempt had nothing to propose."""
        self._empty += 1
        if self._empty >= _EMPTY:
            self._pause(at)

    def told(self, at: int, proposed: int, accepted: int) -> None:
        """The first `accepted` of `proposed` guesses, at least one, were right."""
        self._empty = 0
        if not accepted:
            self._length = max(self._length // 2, 1)
            self._wrong += 1
            if self._wrong >= _WRONG:
                self._pause(at)
            return
        self._wrong = 0
        self._rest //= 2
        if accepted < proposed:
            self._length = accepted + 1
        elif proposed >= self._length:
            self._length *= 2

    def _pause(self, at: int) -> None:
        self._rest = min(max(2 * self._rest, _SHORTEST_REST), _LONGEST_REST)
        self._resume = at + self._rest
