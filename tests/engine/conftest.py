"""Fixtures of the engine's tests."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partialmethod

import mlx.core as mx
import pytest

from backend.engine import device, scheduler
from backend.engine.executing.executor import Executor
from backend.engine.loading import findings
from backend.engine.planning.draft_width import DraftWidth
from tests.long import TEST_LONG

# A GPU has only its own order of waiting; a CPU can take either.
_ORDERS = ["cpu order", "gpu order"] if mx.default_device() == mx.Device(mx.cpu) else ["gpu order"]
if "cpu order" in _ORDERS:
    # as the backend does: MLX would build a kernel for each function
    device.compile_functions(on=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each case of a test with several cases run in one order only, half of them in each.

    With TEST_LONG every case runs in both.
    """
    tests: dict[str, dict[str, dict[str, pytest.Item]]] = defaultdict(lambda: defaultdict(dict))
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if order := given.get("each_order") or given.get("each_order_for_module"):
            test, _, case = item.nodeid.partition("[")
            tests[test][case.replace(order, "")][order] = item
    dropped = set()
    for number, cases in enumerate(tests.values()):
        for at, orders in enumerate(cases.values()):
            if len(cases) > 1 and len(orders) > 1 and not TEST_LONG:
                # Alternating by the number of ones separates the order from every parameter.
                dropped.add(orders[_ORDERS[(number + at.bit_count()) % 2]])
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture(params=_ORDERS)
def each_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test once as on a CPU, where a step waits for results, and once as on a GPU.

    It applies to engines and schedulers that are made after it. A test with other parameters too
    runs in both orders in the sense of `pytest_collection_modifyitems`.
    """
    yield from _in_order(request.param)


@pytest.fixture(scope="module", params=_ORDERS)
def each_order_for_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the tests of a module, which share an engine, in each order."""
    yield from _in_order(request.param)


def _in_order(order: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "may_wait_within_a_step", lambda: order == "cpu order")
        yield


@pytest.fixture(autouse=True)
def no_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No load uses what an earlier one has found."""
    monkeypatch.setattr(findings, "cache_folder", lambda: None)


@pytest.fixture(autouse=True)
def limit_of_this_test() -> Iterator[None]:
    """The memory limit that a load sets ends with the test."""
    yield from _ended_limit()


@pytest.fixture(scope="module", autouse=True)
def limit_of_this_module() -> Iterator[None]:
    """So does one that a load of a module's engine sets, with the module."""
    yield from _ended_limit()


def _ended_limit() -> Iterator[None]:
    # At a limit below what other tests have left in memory, MLX waits after each operation.
    before = mx.get_memory_limit()
    yield
    mx.set_memory_limit(before)


@pytest.fixture
def small_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charge less for a grammar, so that grammars fit beside the KV of the small models."""
    monkeypatch.setattr(scheduler, "_MATCHER_BYTES", 0)


@pytest.fixture
def exact_buffers() -> Iterator[None]:
    """The memory that MLX holds is exactly that of its arrays.

    MLX keeps no freed buffers, which it would reuse for arrays of half their size; a load cannot
    change that. Skips the test on CUDA, where MLX rounds small buffers up by as much as their size.
    """
    if mx.cuda.is_available():
        pytest.skip("MLX's CUDA build rounds buffers up")
    before, set_limit = mx.set_cache_limit(0), mx.set_cache_limit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "set_cache_limit", lambda _: 0)
        yield
    set_limit(before)


@pytest.fixture
def counted_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time advances by a millisecond whenever a scheduler reads a clock: each run is the same."""
    ticks = itertools.count()

    def clock() -> float:
        return next(ticks) / 1e3

    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, clock)
    monkeypatch.setattr(Executor, "__init__", partialmethod(Executor.__init__, clock=clock))


@pytest.fixture
def guesses_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decode step of a model that drafts checks guesses, even if that saves no time."""

    def most(self: DraftWidth, rows: int, longest: int, most: int) -> int:
        return most

    monkeypatch.setattr(DraftWidth, "choose", most)


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The system refuses every new thread until the test calls `undo`."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return monkeypatch
