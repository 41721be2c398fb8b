"""Decides which sequences pause because their grammars take too much of the others' time.

Plain Python without MLX: times are arguments, so the same events always give the same decisions.
All rows of a decode step wait for all masks. So the grammars together have a share of the steps'
time, and may exceed it by `pause` seconds before a sequence has to pause.
"""

from __future__ import annotations

from collections.abc import Mapping

_SHARE = 0.25  # maximum share of the decode steps' time that grammars may take while other rows run
_COSTLY = 0.002  # seconds; pausing a sequence with quicker masks would gain the others little


class MaskShare:
    """The time that grammars used, for one loaded model.

    pause: seconds by which grammars may exceed their share.
    owed: seconds by which costly grammars have exceeded it; later steps make up for them.
    """

    def __init__(self, pause: float) -> None:
        self.owed = 0.0
        self._pause = pause
        self._step = 0.0

    def decoded(self, seconds: float) -> None:
        """Record the seconds of a decode step, masks included."""
        self._step = seconds
        self.owed = max(self.owed - seconds * _SHARE, 0.0)

    def masked(self, seconds: float) -> None:
        """Record the seconds that a sequence's grammar used.

        Only costly grammars add to `owed`: many quick grammars together may exceed the share for
        ever, and then a sequence with a costly grammar would never resume.
        """
        if seconds >= _COSTLY:
            self.owed += seconds

    def too_costly(self, seconds: Mapping[int, float]) -> list[int]:
        """Return the sequences that have to pause because of their masks.

        The list is empty if no other sequence would gain.
        seconds: by number, the time that each decoding sequence's grammar used for its latest
            token; 0 without a grammar.
        """
        if self.owed <= self._pause:
            return []
        total = sum(seconds.values())
        most = max(self._step - total, 0.0) * _SHARE / (1 - _SHARE)
        resting: list[int] = []
        for number in sorted(seconds, key=lambda number: (-seconds[number], number)):
            if total <= most or seconds[number] < _COSTLY:
                break
            total -= seconds[number]
            resting.append(number)
        return resting if len(resting) < len(seconds) else []
