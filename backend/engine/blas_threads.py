"""Gives the preloaded OpenBLAS as many threads as there are cores that nobody else uses.

On a quiet machine a matrix product gains from every core. Beside busy processes it can lose most of
its speed: OpenBLAS waits for its slowest thread by yielding its own core again and again, and the
system may have given both cores to a neighbour. Even neighbours of the lowest priority do that.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

_INTERVAL = 0.2  # seconds between two readings; the system counts in hundredths of a second
_FORGOTTEN = 1.0  # seconds after which an earlier reading says nothing any more
_SPARE = 0.5  # of a core: what neighbours may use of it while a thread of ours still gains there
_SMALL_BYTES = 1 << 20  # a product with less of weights is over before another thread has woken up
_STAT = Path("/proc/stat")
_IDLE_FIELDS = (3, 4)  # of a line of /proc/stat behind the name: idle, waiting for a disk
_COUNTED_FIELDS = 8  # the further ones, time of guests, are in the first ones too

USER_SETTING = "OPENBLAS_NUM_THREADS"


class FreeCores:
    """How many cores neighbours leave free. Pure: times are its arguments.

    cores: that this process may run on.
    """

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self._latest: tuple[float, float, float] | None = None
        self._neighbours = 0.0  # cores that they use
        self._guessed = True

    @property
    def threads(self) -> int:
        """From one to all cores."""
        return max(int(self.cores - self._neighbours + 1 - _SPARE), 1)

    def due(self, now: float) -> bool:
        """Whether another reading would say something new."""
        return self._latest is None or now - self._latest[0] >= _INTERVAL

    def read(self, now: float, busy: float, own: float) -> None:
        """Learn how long the cores were busy, and how long with this process, in seconds since any
        fixed moment."""
        before, self._latest = self._latest, (now, busy, own)
        if before is None or (passed := now - before[0]) > _FORGOTTEN:
            # The time between says nothing of now; what was known last is the best guess until the
            # next reading.
            self._guessed = True
            return
        latest = max(busy - before[1] - (own - before[2]), 0.0) / passed
        falls = latest < self._neighbours and not self._guessed
        weight = min(passed / _FORGOTTEN, 1.0) if falls else 1.0
        self._guessed = False
        self._neighbours += weight * (latest - self._neighbours)


class BlasThreads:
    """The number of threads of this process's OpenBLAS.

    busy: seconds that the cores were busy; apply: sets the number.
    """

    def __init__(
        self, cores: int, busy: Callable[[], float], apply: Callable[[int], object]
    ) -> None:
        self._free = FreeCores(cores)
        self._busy = busy
        self._apply = apply
        self._threads = self._free.threads
        self._resting: threading.Event | None = None
        apply(self._threads)

    def follow(self) -> None:
        """Follow the neighbours until `rest`, within long steps as well. Cheap once it does.

        The number may change while a product runs: OpenBLAS reads it when a product begins, and
        its threads were all started with the first one.
        """
        if self._resting is None and self._free.cores > 1:
            self._resting = threading.Event()
            follower = threading.Thread(
                target=self._follow, args=(self._resting,), name="blas-threads", daemon=True
            )
            follower.start()

    def rest(self) -> None:
        """Nothing is being computed."""
        if self._resting is not None:
            self._resting.set()
            self._resting = None

    def _follow(self, resting: threading.Event) -> None:
        while True:
            self.adjust()
            if resting.wait(_INTERVAL):
                return

    def adjust(self) -> None:
        """Take a reading if one is due, and set the number if it has changed."""
        now = time.monotonic()
        if not self._free.due(now):
            return
        self._free.read(now, self._busy(), time.process_time())
        if self._free.threads != self._threads:
            self._threads = self._free.threads
            self._apply(self._threads)


def busy_seconds(stat: str, cores: Collection[int], ticks: int) -> float:
    """How long these cores were busy since the system started, with time that a hypervisor took.

    stat: what /proc/stat says (proc_stat(5)). ticks: how many it counts in a second.
    """
    names = {f"cpu{core}" for core in cores}
    total = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name in names:
            counts = map(int, fields[:_COUNTED_FIELDS])
            total += sum(count for at, count in enumerate(counts) if at not in _IDLE_FIELDS)
    return total / ticks


def blas_threads(matrix_bytes: int, environ: Mapping[str, str] = os.environ) -> BlasThreads | None:
    """The choice for a model with weight matrices of this size, and for all that is computed from
    now on; None without OpenBLAS, or where the user chose the number."""
    apply = getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    if apply is None or len(cores) < 2 or environ.get(USER_SETTING) or not _STAT.is_file():
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    most = 1 if matrix_bytes < _SMALL_BYTES else len(cores)
    return BlasThreads(most, lambda: busy_seconds(_STAT.read_text(), cores, ticks), apply)
