"""What the engine thread is doing, in memory that another process can share.

Written without locks and without system calls, because it is written for every step: by the
engine thread what concerns steps, by the event loop the rest. Whoever watches only asks whether a
number has changed since the last look, so a value that is read half written does no harm.
"""

from __future__ import annotations

import mmap

BYTES = 512
TICK_SECONDS = 1.0

_NAME = 64  # where the name of the step begins; numbers of eight bytes come before it
_STEPS, _RUNNING, _TICKS, _LIMIT, _PATIENT, _LOADS = range(6)
_UNTIL_LOADED = 3600  # ticks a step may take before a model has set its own limit


class Heartbeat:
    """The progress of one engine. memory: at least BYTES, all 0 at first."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._numbers = memoryview(memory)[:_NAME].cast("Q")

    @classmethod
    def fresh(cls) -> Heartbeat:
        """A heartbeat of this process alone."""
        heartbeat = cls(mmap.mmap(-1, BYTES))
        heartbeat.limit = _UNTIL_LOADED
        return heartbeat

    def move(self, memory: mmap.mmap) -> None:
        """Use other memory from now on. Called before the engine thread starts."""
        memory[:BYTES] = self._memory[:BYTES]
        self._memory = memory
        self._numbers = memoryview(memory)[:_NAME].cast("Q")

    def begin(self, step: str, *, loads: bool = False) -> None:
        """A step begins, and the one before it has ended.

        step: its name, for people. loads: whether it is a stage of a load.
        """
        name = step.encode()[: BYTES - _NAME - 1] + b"\0"
        self._memory[_NAME : _NAME + len(name)] = name
        self._numbers[_LOADS] = loads
        self._numbers[_STEPS] += 1
        self._numbers[_RUNNING] = 1

    def rest(self) -> None:
        """The last step has ended, and there is no work."""
        self._numbers[_RUNNING] = 0

    def tick(self) -> None:
        """The event loop runs."""
        self._numbers[_TICKS] += 1

    @property
    def steps(self) -> int:
        """How many steps have begun."""
        return self._numbers[_STEPS]

    @property
    def running(self) -> bool:
        """Whether a step runs now."""
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
        """Ticks that a step may take; 0 means any number of them."""
        return self._numbers[_LIMIT]

    @limit.setter
    def limit(self, ticks: int) -> None:
        self._numbers[_LIMIT] = ticks

    @property
    def patient(self) -> bool:
        """Whether somebody waits for a load: its stages may take any time."""
        return bool(self._numbers[_PATIENT])

    @patient.setter
    def patient(self, patient: bool) -> None:
        self._numbers[_PATIENT] = patient

    @property
    def guarded(self) -> bool:
        """Whether a standstill counts now."""
        return self.limit > 0 and not (self.patient and self._numbers[_LOADS])

    @property
    def complaint(self) -> str:
        """The sentence on the latest step, when it hangs."""
        return f"the engine hangs: {self.step} has not ended within {self.limit} s"


def counted(count: int, noun: str) -> str:
    """`1 sequence`, `4 sequences`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Standstill:
    """Counts how often in a row a number was looked at that should have changed and had not.

    Looks are counted instead of seconds, because a process that was stopped, or a machine that
    was suspended, has made no progress either: its clock may have advanced, but it has not run.
    """

    def __init__(self) -> None:
        self._number = -1
        self._looks = 0

    def look(self, number: int, *, due: bool) -> int:
        """The count after this look. due: whether the number should change at all."""
        self._looks = self._looks + 1 if due and number == self._number else 0
        self._number = number
        return self._looks
