"""Chooses how many threads the preloaded OpenBLAS uses, by what decode steps take.

On a quiet machine a matrix product gains from every core. Beside busy processes it can lose most
of its speed, because OpenBLAS waits for its slowest thread and the system may have given that
thread's core away. Neither number is right for both, and neighbours come and go, so the numbers are
tried against each other: rarely while nothing changes, at once when steps take a different time.
"""

from __future__ import annotations

import ctypes
import os
import statistics
from collections.abc import Callable, Mapping

_ROUNDS = 3  # how often a trial runs every number
_STEPS = 3  # steps in a row with one number; the first is not counted, it began with another
_FIRST_INTERVAL, _LONGEST_INTERVAL = 64, 2048  # steps between two trials
_GAIN = 0.97  # of the present number's time: what another one has to reach
_CHANGED, _CHANGED_STEPS = 1.35, 4  # times the usual or a part of it, in so many steps in a row
_MEMORY = 0.9  # weight of earlier steps in the usual time

USER_SETTING = "OPENBLAS_NUM_THREADS"


class ThreadChoice:
    """Tries numbers of threads against each other. Pure: the steps' times are its arguments.

    numbers: to choose from, the first of them at the beginning. threads: for the next step.
    """

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._best = numbers[0]
        self._interval = _FIRST_INTERVAL
        self._left = _FIRST_INTERVAL // 4  # steps until the next trial
        self._width = 0
        self._usual = 0.0
        self._unusual = 0
        self._order: list[int] = []  # of a trial, the number of threads of each step to come
        self._times: dict[int, list[float]] = {}
        self.threads = self._best

    def measured(self, width: int, seconds: float) -> int:
        """Learn from a decode step of `width` sequences; returns the threads for the next one."""
        if width != self._width:
            if self._order:
                self._left = _FIRST_INTERVAL // 4
            self._width, self._usual, self._order, self._unusual = width, 0.0, [], 0
        elif self._order:
            self._try(seconds)
        else:
            self._watch(seconds)
        self.threads = self._order[0] if self._order else self._best
        return self.threads

    def _watch(self, seconds: float) -> None:
        if not self._usual:
            self._usual = seconds
        usual = self._usual / _CHANGED < seconds < self._usual * _CHANGED
        self._unusual = 0 if usual else self._unusual + 1
        self._usual = _MEMORY * self._usual + (1 - _MEMORY) * seconds
        self._left -= 1
        if self._unusual >= _CHANGED_STEPS:
            self._interval = _FIRST_INTERVAL
            self._left = 0
        if self._left <= 0:
            self._unusual, self._times = 0, {number: [] for number in self._numbers}
            self._order = [n for _ in range(_ROUNDS) for n in self._numbers for _ in range(_STEPS)]

    def _try(self, seconds: float) -> None:
        number = self._order.pop(0)
        if len(self._order) % _STEPS != _STEPS - 1:
            self._times[number].append(seconds)
        if self._order:
            return
        times = {number: statistics.median(taken) for number, taken in self._times.items()}
        fastest = min(times, key=lambda number: times[number])
        if times[fastest] < _GAIN * times[self._best]:
            self._best, self._interval = fastest, _FIRST_INTERVAL
        else:
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
        self._left, self._usual = self._interval, times[self._best]


class BlasThreads:
    """The number of threads of this process's OpenBLAS, set after each decode step."""

    def __init__(self, choice: ThreadChoice, apply: Callable[[int], object]) -> None:
        self._choice = choice
        self._apply = apply
        self._threads = choice.threads
        apply(self._threads)

    def measured(self, width: int, seconds: float) -> None:
        """Learn from a decode step that had the device for itself."""
        threads = self._choice.measured(width, seconds)
        if threads != self._threads:
            self._threads = threads
            self._apply(threads)


def blas_threads(environ: Mapping[str, str] = os.environ) -> BlasThreads | None:
    """The choice for this process; None without OpenBLAS, or where the user chose the number.

    The number may change while a product runs: OpenBLAS reads it when a product begins, and its
    threads were all started with the first one.
    """
    apply = getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if apply is None or cores < 2 or environ.get(USER_SETTING):
        return None
    # One thread comes first: it is never much slower than the others, and they can be.
    return BlasThreads(ThreadChoice(sorted({1, max(cores // 2, 1), cores})), apply)
