"""Records the engine's progress in memory that can be shared with another process.

The record is written on every step, so writing uses no locks and no system calls. The engine thread
writes the numbers about steps, the event loop all others. The watchdog only compares a number with
its last value, so reading a number while it is being written does no harm.
"""

from __future__ import annotations

import math
import mmap
import re
from functools import lru_cache
from typing import NamedTuple

BYTES = 512
TICK_SECONDS = 1.0

_MOST_SECONDS = 1.5  # the most that counts between two checks, which may be late
_NAME = 64  # offset of the step's name; the bytes before are numbers of eight bytes each
_STEPS, _RUNNING, _TICKS, _LIMIT, _PATIENT, _LOADS = range(6)
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


_UNTIL_LOADED = StepTimeout(3600, 3600)  # before a model has set its own


class Heartbeat:
    """The progress of one engine.

    memory: at least BYTES bytes, initially 0.
    limits: decides how long a step may take.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.limits = StepLimits(_UNTIL_LOADED)
        self._began: tuple[object, ...] = ()  # the values on which the latest record depends
        self._repeats = False  # whether the latest two records depend on equal values
        self._memory = memory
        self._numbers = memoryview(memory)[:_NAME].cast("Q")

    @classmethod
    def fresh(cls) -> Heartbeat:
        """Return a heartbeat in private memory."""
        heartbeat = cls(mmap.mmap(-1, BYTES))
        heartbeat._numbers[_LIMIT] = _UNTIL_LOADED.most
        return heartbeat

    def move(self, memory: mmap.mmap) -> None:
        """Use other memory from now on. Must be called before the engine thread starts."""
        memory[:BYTES] = self._memory[:BYTES]
        self._memory = memory
        self._numbers = memoryview(memory)[:_NAME].cast("Q")

    def begin(self, step: str, *, expected: float | None = 0.0, loads: bool = False) -> None:
        """Record that a step begins, and that the step before has ended.

        step: name of the step, for messages.
        expected: predicted seconds, as in `StepLimits.begin`.
        loads: whether the step is a stage of a load.
        """
        began = (self.limits, step, expected, loads, self._numbers[_TICKS])
        if began == self._began and self._repeats:
            self._numbers[_STEPS] += 1  # nothing else can differ from the step before
            return
        self._repeats, self._began = began == self._began, began
        limit = self.limits.begin(step, math.inf if loads else expected, self.ticks)
        if not self._repeats:
            name = step.encode()[: BYTES - _NAME - 1] + b"\0"
            self._memory[_NAME : _NAME + len(name)] = name
        self._numbers[_LOADS] = loads
        self._numbers[_STEPS] += 1
        self._numbers[_LIMIT] = limit  # after the count, so that it never applies to another step
        self._numbers[_RUNNING] = 1

    def rest(self) -> None:
        """Record that the last step has ended and that there is no work."""
        self.limits.end(self.ticks)
        self._began, self._repeats = (), False
        self._numbers[_RUNNING] = 0

    def tick(self) -> None:
        """Record that the event loop is running."""
        self._numbers[_TICKS] += 1

    @property
    def steps(self) -> int:
        """The number of steps that have begun."""
        return self._numbers[_STEPS]

    @property
    def running(self) -> bool:
        """Whether a step is running."""
        return bool(self._numbers[_RUNNING])

    @property
    def step(self) -> str:
        """The name of the latest step."""
        return self._memory[_NAME:BYTES].partition(b"\0")[0].decode("utf-8", "replace")

    @property
    def ticks(self) -> int:
        """How often the event loop has reported that it runs."""
        return self._numbers[_TICKS]

    @property
    def limit(self) -> int:
        """Seconds that the latest step may take; 0 means no limit."""
        return self._numbers[_LIMIT]

    @property
    def patient(self) -> bool:
        """Whether a LoadModel call is waiting: the stages of a load then have no time limit."""
        return bool(self._numbers[_PATIENT])

    @patient.setter
    def patient(self, patient: bool) -> None:
        self._numbers[_PATIENT] = patient

    @property
    def guarded(self) -> bool:
        """Whether a step that does not end counts as hung."""
        return self.limit > 0 and not (self.patient and self._numbers[_LOADS])

    @property
    def hang_message(self) -> str:
        """The error message if the latest step hangs."""
        return f"the engine hangs: {self.step} has not ended within {self.limit} s"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as `4 sequences`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Standstill:
    """Measures how long a number that should change has stayed the same. Pure.

    Between two checks at most _MOST_SECONDS count: while a process is stopped or a machine is
    suspended, the clock may advance although nothing can run.
    """

    def __init__(self) -> None:
        self._number = -1
        self._checked = self._seconds = 0.0

    def check(self, number: int, now: float, *, due: bool) -> float:
        """Return the seconds for which the number has not changed although that was `due`."""
        passed = min(now - self._checked, _MOST_SECONDS)
        self._seconds = self._seconds + passed if due and number == self._number else 0.0
        self._number, self._checked = number, now
        return self._seconds
