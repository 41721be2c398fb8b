"""Fixtures of the engine's tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import mlx.core as mx
import pytest

from backend.engine import device, scheduler
from backend.engine.loading import findings
from backend.engine.planning.guess_width import GuessWidth

# A GPU has only its own order of waiting; a CPU can take either.
_ORDERS = ["cpu order", "gpu order"] if mx.default_device() == mx.Device(mx.cpu) else ["gpu order"]
if "cpu order" in _ORDERS:
    mx.disable_compile()  # as the backend does: MLX would build a kernel for each function


@pytest.fixture(params=_ORDERS)
def each_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test once as on a CPU, where a step waits for results, and once as on a GPU.

    It applies to engines and schedulers that are made after it.
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
def guesses_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decode step of a model that drafts checks guesses, even if that saves no time."""

    def most(self: GuessWidth, rows: int, longest: int, most: int) -> int:
        return most

    monkeypatch.setattr(GuessWidth, "choose", most)


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The system refuses every new thread until the test calls `undo`."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return monkeypatch
