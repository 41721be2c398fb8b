"""Decides which sequences pause because computing their grammar masks delays the others too much.

A decode step waits for the masks of all its rows. So all grammars together may use a fixed share of
the time of decode steps. They may exceed this share by `pause` seconds before a sequence has to
pause. Plain Python without MLX: times are arguments, so the same events always give the same
decisions.
"""

from __future__ import annotations

from collections.abc import Mapping

_SHARE = 0.25  # maximum share of the decode steps' time that grammars may use while other rows run
_COSTLY = 0.002  # seconds; a pause of a sequence with quicker masks would save the others little


class MaskShare:
    """Records the time that the grammars of one loaded model use.

    pause: seconds by which grammars may exceed their share.
    owed: seconds by which costly grammars now exceed their share; every decode step reduces it.
    """

    def __init__(self, pause: float) -> None:
        self.owed = 0.0
        self._pause = pause
        self._step = 0.0

    def decoded(self, seconds: float, before: float = 0.0) -> None:
        """Record the duration of a decode step in seconds, including its masks.

        before: seconds of earlier steps that were not recorded.
        """
        self._step = seconds
        self.owed = max(self.owed - (before + seconds) * _SHARE, 0.0)

    def masked(self, seconds: float) -> None:
        """Record the seconds that a sequence's grammar used for one mask.

        Only costly grammars add to `owed`. Many quick grammars together may exceed the share
        permanently, and a paused sequence with a costly grammar would then never resume.
        """
        if seconds >= _COSTLY:
            self.owed += seconds

    def too_costly(self, seconds: Mapping[int, float]) -> list[int]:
        """Return the numbers of the sequences that have to pause because of their masks.

        The list is empty if no other sequence would be faster.

        seconds: by decoding sequence, the time of the grammar for the latest token; 0 without one.
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
