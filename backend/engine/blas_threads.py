"""Adjusts the number of OpenBLAS threads to the number of cores that other processes leave free.

On an idle machine a matrix product gains from every core. Next to busy processes it can lose most
of its speed: OpenBLAS waits for its slowest thread in a loop of yields, and the system may
meanwhile give OpenBLAS's cores to other processes, even to those of the lowest priority.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_INTERVAL = 0.2  # seconds between two readings; the system counts in hundredths of a second
_OUTDATED = 1.0  # seconds after which an earlier reading is outdated
# A thread still helps on a core of which other processes use at most this share. The exact value
# depends on the product: long ones still gain from a busier core, short ones already lose.
_SPARE = 0.65
_JUMP = 0.5  # cores; a larger rise is that of a process that has just begun, a smaller one is noise
_SMALL_BYTES = 1 << 20  # products with fewer bytes of weights end before another thread wakes up
_STAT = Path("/proc/stat")
_IDLE_FIELDS = (3, 4)  # of a line in /proc/stat, after the name: idle, waiting for a disk
_COUNTED_FIELDS = 8  # the rest is guest time, which the first fields include

USER_SETTING = "OPENBLAS_NUM_THREADS"


class FreeCores:
    """Estimates how many of `cores` other processes leave free. Pure: times are arguments."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self._latest: tuple[float, float, float] | None = None
        self._neighbours = 0.0  # cores that other processes use
        self._guessed = True

    @property
    def threads(self) -> int:
        """The number of threads to use, from 1 to all cores."""
        return max(int(self.cores - self._neighbours + _SPARE), 1)

    def due(self, now: float) -> bool:
        """Return whether enough time has passed for another reading."""
        return self._latest is None or now - self._latest[0] >= _INTERVAL

    def read(self, now: float, busy: float, own: float) -> None:
        """Update from a reading, in seconds since any fixed time.

        busy: busy time of all cores.
        own: the part of the busy time that this process used.
        """
        before, self._latest = self._latest, (now, busy, own)
        if before is None or (passed := now - before[0]) > _OUTDATED:
            # An average over such a long time says little: use the last value until the next
            # reading.
            self._guessed = True
            return
        latest = max(busy - before[1] - (own - before[2]), 0.0) / passed
        at_once = self._guessed or latest > self._neighbours + _JUMP
        weight = 1.0 if at_once else min(passed / _OUTDATED, 1.0)
        self._guessed = False
        self._neighbours += weight * (latest - self._neighbours)


class BlasThreads:
    """Controls the number of threads of this process's OpenBLAS.

    cores: maximum number of threads.
    busy: returns the busy seconds of the cores.
    apply: sets the number of threads.
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
        """Adjust the number of threads regularly until `rest` is called, also during long steps.

        Repeated calls are cheap. The number may change while a product runs: OpenBLAS reads it when
        a product begins, and starts all its threads with the first product.
        """
        if self._resting is None and self._free.cores > 1:
            self._resting = threading.Event()
            follower = threading.Thread(
                target=self._follow, args=(self._resting,), name="blas-threads", daemon=True
            )
            with suppress(RuntimeError):  # no more threads are allowed: the number stays
                follower.start()

    def rest(self) -> None:
        """Stop adjusting, because nothing is being computed."""
        if self._resting is not None:
            self._resting.set()
            self._resting = None

    def _follow(self, resting: threading.Event) -> None:
        while True:
            self.adjust()
            if resting.wait(_INTERVAL):
                return

    def adjust(self) -> None:
        """Take a reading if one is due, and apply the number of threads if it has changed."""
        now = time.monotonic()
        if not self._free.due(now):
            return
        self._free.read(now, self._busy(), time.process_time())
        if self._free.threads != self._threads:
            self._threads = self._free.threads
            self._apply(self._threads)


def busy_seconds(stat: str, cores: Collection[int], ticks: int) -> float:
    """Return the busy seconds of these cores since the system started, including stolen time.

    stat: the contents of /proc/stat (proc_stat(5)), with `ticks` per second.
    """
    names = {f"cpu{core}" for core in cores}
    total = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name in names:
            counts = map(int, fields[:_COUNTED_FIELDS])
            total += sum(count for at, count in enumerate(counts) if at not in _IDLE_FIELDS)
    return total / ticks


def most_blas_threads(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many threads OpenBLAS starts with its first product; 0 without OpenBLAS."""
    config = getattr(ctypes.CDLL(None), "openblas_get_config", None)
    if config is None:
        return 0
    config.restype = ctypes.c_char_p
    found = re.search(rb"MAX_THREADS=(\d+)", config())
    chosen = environ.get(USER_SETTING, "")
    threads = int(chosen) if chosen.isdecimal() else len(_cores())
    return min(threads, int(found[1])) if found else threads


def blas_threads(matrix_bytes: int, environ: Mapping[str, str] = os.environ) -> BlasThreads | None:
    """Return the thread control for a model with this many bytes of weight matrices.

    Returns None without OpenBLAS, or if the user has set the number of threads.
    """
    apply = getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
    cores = _cores()
    if apply is None or len(cores) < 2 or environ.get(USER_SETTING) or not _STAT.is_file():
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    most = 1 if matrix_bytes < _SMALL_BYTES else len(cores)
    return BlasThreads(most, lambda: busy_seconds(_STAT.read_text(), cores, ticks), apply)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Compute on one thread in the block, because more can take several times as much CPU time."""
    library = ctypes.CDLL(None)
    apply = getattr(library, "openblas_set_num_threads", None)
    if apply is None:
        yield
        return
    before = library.openblas_get_num_threads()
    apply(1)
    try:
        yield
    finally:
        apply(before)


def _cores() -> set[int]:
    """Return the cores that this process may use, where the system says so."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
