"""OpenBLAS uses the cores that other processes leave free."""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import random
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine import blas_threads as module
from backend.engine.blas_threads import (
    BlasThreads,
    FreeCores,
    blas_threads,
    busy_seconds,
    most_blas_threads,
    one_blas_thread,
)
from backend.engine.caching.cache_kind import CacheKind
from backend.engine.loading import traits
from backend.engine.loading.pass_cost import pass_cost
from tests.engine.random_models import random_model

STAT = """cpu  900 0 0 9000 0 0 0 0 50 0
cpu0 100 20 30 4000 500 6 7 8 9 0
cpu1 300 0 0 5000 0 0 0 0 0 0
cpu10 500 0 0 0 0 0 0 0 0 0
intr 12345
"""


def _after(neighbours: list[float], *, own: float = 1.0, cores: int = 2) -> list[int]:
    """The number of threads after each reading; neighbours: cores that other processes use."""
    free = FreeCores(cores)
    free.read(0.0, 0.0, 0.0)
    busy = 0.0
    found = []
    for at, used in enumerate(neighbours, 1):
        busy += 0.25 * (used + own)
        free.read(0.25 * at, busy, 0.25 * own * at)
        found.append(free.threads)
    return found


def test_an_idle_machine_gives_every_core() -> None:
    assert FreeCores(8).threads == 8
    assert _after([0.0, 0.1, 0.3]) == [2, 2, 2]
    assert _after([0.3] * 3, cores=16, own=15.0) == [16, 16, 16]


def test_a_busy_core_is_given_up_at_once() -> None:
    assert _after([0.0, 1.0]) == [2, 1]
    assert _after([3.0], cores=8) == [5]


def _around(mean: float, spread: float, count: int, seed: int) -> list[float]:
    dice = random.Random(seed)
    return [max(mean + dice.uniform(-spread, spread), 0.0) for _ in range(count)]


@pytest.mark.parametrize("seed", range(10))
def test_the_short_bursts_of_hosts_and_clients_leave_both_cores(seed: int) -> None:
    """At 16 streams, the gateway and the clients on the machine use half a core."""
    threads = _after(_around(0.5, 0.25, 200, seed))
    assert threads.count(2) >= 198


@pytest.mark.parametrize("before", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(10))
def test_a_process_that_never_rests_gets_a_core_within_a_second(before: float, seed: int) -> None:
    """Beside two threads it gets no more than 0.7 to 0.9 of a core, beside one thread a whole."""
    threads = _after([before] * 8 + _around(before + 0.8, 0.05, 4, seed) + [before + 1.0] * 20)
    assert threads[:8] == [2] * 8
    assert threads[11:] == [1] * 21


def test_an_idle_core_is_used_with_a_delay() -> None:
    threads = _after([2.0] * 4 + [0.0] * 12)
    assert threads[:6] == [1] * 6
    assert threads[-1] == 2


def test_measurements_from_idle_time_are_not_used() -> None:
    free = FreeCores(2)
    free.read(0.0, 0.0, 0.0)
    free.read(10.0, 20.0, 0.0)
    assert free.threads == 2
    free.read(10.25, 20.5, 0.0)
    assert free.threads == 1
    free.read(20.0, 20.5, 0.0)
    assert free.threads == 1
    free.read(20.25, 20.5, 0.0)
    assert free.threads == 2


@given(st.lists(st.floats(0, 16)), st.integers(1, 64))
def test_at_least_one_thread_and_at_most_one_per_core(neighbours: list[float], cores: int) -> None:
    assert all(1 <= threads <= cores for threads in _after(neighbours, cores=cores))


def test_the_processes_own_use_does_not_count() -> None:
    assert _after([0.0] * 4, own=2.0) == [2] * 4


def test_busy_seconds_leave_out_idle_cores_and_those_of_others() -> None:
    assert busy_seconds(STAT, {0}, 100) == pytest.approx(1.71)
    assert busy_seconds(STAT, {0, 1}, 100) == pytest.approx(4.71)


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="only Linux has /proc/stat")
def test_busy_seconds_of_this_machine_grow_with_work() -> None:
    def busy() -> float:
        stat = Path("/proc/stat").read_text()
        return busy_seconds(stat, os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK"))

    before = busy()
    subprocess.run([sys.executable, "-c", "sum(range(30_000_000))"], check=True)
    assert busy() - before > 0.1


def test_the_number_is_set_only_if_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[int] = []
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    busy = [0.0]
    threads = BlasThreads(2, lambda: busy[0], applied.append)
    for used in (0.0, 1.0, 1.0, 0.0, 0.0, 0.0):
        for _ in range(20):
            clock[0] += 0.05
            busy[0] += 0.05 * used
            threads.adjust()
    assert applied == [2, 1, 2]
    assert all(one != other for one, other in pairwise(applied))


def test_other_processes_are_watched_until_the_computation_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_INTERVAL", 0.0)
    applied: queue.Queue[int] = queue.Queue()
    clock, busy = itertools.count(0.0, 0.1), itertools.count(0.0, 0.2)  # two cores, throughout
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    threads = BlasThreads(2, lambda: next(busy), applied.put)
    assert applied.get(timeout=60) == 2
    threads.follow()
    assert applied.get(timeout=60) == 1
    (follower,) = [one for one in threading.enumerate() if one.name == "blas-threads"]
    threads.follow()
    assert [one for one in threading.enumerate() if one.name == "blas-threads"] == [follower]
    threads.rest()
    follower.join(60)
    assert not follower.is_alive()


def test_a_number_that_the_user_set_is_kept() -> None:
    assert blas_threads(1 << 30, {"OPENBLAS_NUM_THREADS": "3"}) is None


@pytest.mark.skipif(not most_blas_threads({}), reason="no OpenBLAS")
@pytest.mark.skipif("OPENBLAS_NUM_THREADS" not in os.environ, reason="loads set the number")
def test_no_test_changes_the_number_for_others() -> None:
    """Beside the other worker, the tests of models took twice the CPU time with two threads."""
    assert ctypes.CDLL(None).openblas_get_num_threads() == most_blas_threads()


@pytest.mark.skipif(most_blas_threads({}) < 2, reason="no OpenBLAS, or a single core")
def test_small_matrices_are_computed_on_one_thread() -> None:
    """With matrices of 160 kB, a decode step took 1.5 times as long on two threads."""
    blas = ctypes.CDLL(None)
    before = blas.openblas_get_num_threads()
    try:
        for matrix_bytes, threads in ((1 << 16, 1), (1 << 24, len(os.sched_getaffinity(0)))):
            assert blas_threads(matrix_bytes, {}) is not None
            assert blas.openblas_get_num_threads() == threads
    finally:
        blas.openblas_set_num_threads(before)


@pytest.mark.skipif(most_blas_threads({}) < 2, reason="no OpenBLAS, or a single core")
def test_one_thread_is_used_for_a_while() -> None:
    threads = ctypes.CDLL(None).openblas_get_num_threads
    before = threads()
    with one_blas_thread():
        assert threads() == 1
    assert threads() == before


@pytest.mark.skipif(most_blas_threads({}) < 2, reason="no OpenBLAS, or a single core")
def test_a_load_measures_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = ctypes.CDLL(None).openblas_get_num_threads
    before, seen = threads(), []

    def measured(*arguments: Any, **named: Any) -> Any:
        seen.append(threads())
        return pass_cost(*arguments, **named)

    monkeypatch.setattr(traits, "pass_cost", measured)
    loaded: Any = SimpleNamespace(model=random_model("full"), weights_bytes=1, name="it")
    stages = traits.measure(loaded, CacheKind(), 1 << 30)
    assert {threads() for _ in stages} == {before}
    assert seen == [1]
