"""Decides which sequences rest because their grammars take too much of the others' time.

Plain Python without MLX, like the planner, which asks it: times come in as arguments, so the same
events always give the same decisions. All rows of a decode step wait for all masks, so grammars
have a share of the steps' time, and may exceed it by one pause before a sequence has to rest.
"""

from __future__ import annotations

from collections.abc import Mapping

_SHARE = 0.25  # most of the decode steps' time that grammars take while other rows run
_COSTLY = 0.002  # seconds; a sequence whose mask takes less would gain the others little by resting


class MaskShare:
    """What grammars took, for one loaded model. pause: seconds.

    owed: seconds that costly grammars took beyond the share, which later steps make up for.
    """

    def __init__(self, pause: float) -> None:
        self.owed = 0.0
        self._pause = pause
        self._step = 0.0

    def decoded(self, seconds: float) -> None:
        """A decode step took so long, masks included."""
        self._step = seconds
        self.owed = max(self.owed - seconds * _SHARE, 0.0)

    def masked(self, seconds: float) -> None:
        """A sequence's grammar took so long. What a quick one takes is not made up for: many of
        them may take more than the share for ever, and no rest of another would change that."""
        if seconds >= _COSTLY:
            self.owed += seconds

    def too_costly(self, seconds: Mapping[int, float]) -> list[int]:
        """The sequences that are to rest, so that the others can afford their masks.

        seconds: what the grammar of each decoding sequence took for its latest token; 0 without
        one. Nobody rests where no other sequence would gain.
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
