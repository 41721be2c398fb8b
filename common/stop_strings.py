"""Finds stop strings in text that arrives in pieces, and never outputs a part of a stop string.

Text is withheld only while it may still become a stop string; all other text is output immediately.
The result does not depend on how the text was split into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Matches several stop strings incrementally; empty strings are ignored.

    The first complete stop string ends the text, as if the text were read character by character.
    If two stop strings end at the same character, the longer one applies.

    strings: the stop strings that are not empty.
    found: the stop string that has ended the text; '' if there is none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.strings = tuple(stop for stop in stops if stop)
        self._longest = max((len(stop) for stop in self.strings), default=0)
        self._pending = ""
        self.found = ""

    def feed(self, text: str) -> str:
        """Add the next piece. Returns the text that may be output now; '' after a match."""
        if not self.strings:
            return text
        if self.found or not text:
            return ""
        self._pending += text
        matches = [
            (start + len(stop), start)
            for stop in self.strings
            if (start := self._pending.find(stop)) >= 0
        ]
        end, cut = min(matches) if matches else (0, self._first_open())
        self.found = self._pending[cut:end]
        shown, self._pending = self._pending[:cut], "" if matches else self._pending[cut:]
        return shown

    def finish(self) -> str:
        """End the text without a match, and return the text that was withheld."""
        shown, self._pending = self._pending, ""
        return shown

    def _first_open(self) -> int:
        """Return the first offset from which the pending text may become a stop string."""
        end = len(self._pending)
        for start in range(max(0, end - self._longest + 1), end):
            if any(stop.startswith(self._pending[start:]) for stop in self.strings):
                return start
        return end
