"""Decides after how many seconds an engine step counts as hung."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import NamedTuple

_FACTOR = 20  # multiple of the longest time, measured or predicted, of a step of the same kind


class StepTimeout(NamedTuple):
    """Bounds, in seconds, of the time after which a step counts as hung; 0 and 0 mean never.

    compiles: whether the first step of each kind may compile kernels.
    """

    least: int
    most: int
    compiles: bool = False


class StepLimits:
    """The time limits of one model's steps. Pure: the time is an argument.

    The time is in ticks of about a second, which do not advance while the process is stopped.
    Steps are of one kind if their names differ only in numbers.
    """

    def __init__(self, timeout: StepTimeout) -> None:
        self._timeout = timeout
        self._kind: str | None = None
        self._began = 0
        self._longest: dict[str, int] = {}  # ticks, by kind; without steps that may have compiled

    def begin(self, step: str, expected: float | None, tick: int) -> int:
        """Return the seconds that a step may take.

        step: name of the step.
        expected: predicted seconds; None if nothing is known yet, and infinity if the step may take
            any time.
        tick: the current time.
        """
        least, most, compiles = self._timeout
        self.end(tick)
        self._kind, self._began = _kind(step), tick
        longest = self._longest.get(self._kind)
        if longest is None and (compiles or expected is None):
            return most
        seconds = max(longest or 0, expected or 0.0)
        return math.ceil(min(max(_FACTOR * seconds, least), most))

    def end(self, tick: int) -> None:
        """Record that the latest step has ended."""
        if self._kind is not None:
            first = self._timeout.compiles and self._kind not in self._longest
            ticks = 0 if first else tick - self._began
            self._longest[self._kind] = max(self._longest.get(self._kind, 0), ticks)
        self._kind = None


@lru_cache(maxsize=64)
def _kind(step: str) -> str:
    return re.sub(r"\d+", "", step)
