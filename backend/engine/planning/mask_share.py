"""Decides which sequences pause because their grammars take too much of the others' time.

Plain Python without MLX, like the planner, which uses it: times are arguments, so the same events
always give the same decisions. All rows of a decode step wait for all masks, so grammars have a
share of the steps' time, and may exceed it by `pause` seconds before a sequence has to stop.
"""

from __future__ import annotations

from collections.abc import Mapping

_SHARE = 0.25  # maximum share of the decode steps' time for grammars while other rows run
_COSTLY = 0.002  # seconds; pausing a sequence whose mask takes less would gain the others little


class MaskShare:
    """The time that grammars took, for one loaded model. pause: seconds.

    owed: seconds that costly grammars took beyond the share, which later steps make up for.
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
        """Record the seconds that a sequence's grammar took.

        Those of a quick grammar are not made up for: many of them may always take more than the
        share, and then a costly one would never resume.
        """
        if seconds >= _COSTLY:
            self.owed += seconds

    def too_costly(self, seconds: Mapping[int, float]) -> list[int]:
        """The sequences that have to pause, so that the others can afford their masks.

        seconds: the time of each decoding sequence's grammar for its latest token; 0 without a
        grammar. None pauses if no other sequence would gain.
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
