"""Two sides that take turns, and the ratio of their speeds.

The speed of a machine drifts by more than many goals allow, so short rounds are compared in pairs.
Pairs are added until it is clear on which side of the goal the median of their ratios lies, or the
time is over.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from bench.report import Figure, at_least

Side = TypeVar("Side")

_Z = 2.576  # standard deviations on either side of the mean of a normal distribution, for 99 %


def at_least_in_pairs(
    name: str,
    bound: float,
    ours: Callable[[int], float],
    theirs: Callable[[int], float],
    *,
    pairs: int,
    seconds: float,
) -> Figure:
    """Compare two speeds; the side that goes first alternates.

    ours, theirs: called with the number of the round.
    pairs: the minimum number of rounds.
    seconds: no pair starts after this time.
    """
    speeds: list[tuple[float, float]] = []
    began = time.perf_counter()
    while True:
        turn = len(speeds)
        if turn % 2:
            mine, others = ours(turn), theirs(turn)
        else:
            others, mine = theirs(turn), ours(turn)
        speeds.append((mine, others))
        ratios = [mine / others for mine, others in speeds]
        low, high = interval(ratios)
        decided = low >= bound or high < bound
        if len(speeds) >= pairs and (decided or time.perf_counter() - began > seconds):
            break
    medians = " / ".join(f"{statistics.median(side):.3g}" for side in zip(*speeds, strict=True))
    detail = f"{low:.3g} to {high:.3g} in {len(speeds)} pairs, {medians}"
    return at_least(name, statistics.median(ratios), bound, detail)


def in_turn(
    measured: Callable[[Side, int], float], sides: Mapping[str, Side], rounds: int
) -> list[list[float]]:
    """Measure the sides in turn, and return the values of each side.

    measured: called with a side and the number of the round.
    """
    values = [[measured(side, turn) for side in sides.values()] for turn in range(rounds)]
    return [list(side) for side in zip(*values, strict=True)]


def ratio(values: Sequence[Sequence[float]], bound: float) -> tuple[float, float, str]:
    """Return the ratio of two sides' medians, the bound, and the values of all rounds."""
    mine, others = map(statistics.median, values)
    rounds = " / ".join(", ".join(f"{value:.3g}" for value in side) for side in values)
    return mine / others, bound, rounds


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 99 % confidence interval of the median, from order statistics.

    How many values lie below the median is binomial, here approximated by a normal distribution.
    """
    ordered = sorted(values)
    outside = max(math.floor(len(values) / 2 - _Z * math.sqrt(len(values)) / 2), 0)
    return ordered[outside], ordered[-1 - outside]
