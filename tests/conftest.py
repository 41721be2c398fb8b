"""Settings for all tests: MLX, hypothesis, and the order of the files.

The files that take longest come first, so that all workers stay busy.
"""

from __future__ import annotations

import gc
import os
import pwd
from collections.abc import Generator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

from backend.engine import device
from backend.engine.mlx_lm_import import import_mlx_lm
from tests import preemption
from tests.engine.ranks.yielding import yielding as yielding  # a fixture
from tests.long import TEST_LONG, examples
from tests.skipped import left_out

# Tests compare float32 results to within 1e-5. MLX's CUDA build multiplies with
# TF32 by default, which keeps only 10 bits of a factor.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# No deadlines: a slow machine is no fault of the code. Without TEST_LONG every run has the same
# examples.
settings.register_profile(
    "unhurried",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not TEST_LONG,
    max_examples=examples(100),
)
settings.load_profile("unhurried")

HERE = Path(__file__).parent
# None of these uses its folder's shared process, which ends when a worker turns to another folder.
LONG = (
    "acceptance/test_rank_faults.py",
    "architectures/test_architectures.py",
    "acceptance/test_ranks.py",
    "acceptance/test_hanging.py",
    "engine/vision/test_families.py",
    "engine/test_memory.py",
    "clients/test_schemathesis.py",
    "engine/executing/test_executor_faults.py",
    "gateway/supervisor/test_supervisor.py",
    "engine/test_tight_memory.py",
    "install/test_package.py",
    "engine/test_conversations.py",
    "engine/test_costly_masks.py",
    "install/test_install.py",
    "install/test_openblas.py",
    "gateway/supervisor/test_supervisor_spawns.py",
    "gateway/test_crowd.py",
    "engine/vision/test_videos.py",
    "engine/test_scheduler.py",
    "engine/test_parity.py",
    "acceptance/test_restart.py",
    "rpc/test_process.py",
    "common/test_chat_corpus.py",
    "common/test_foreign_calls.py",
    "common/test_partial_calls.py",
    "engine/planning/test_planner.py",
    "engine/constraints/test_calls.py",
    "test_words.py",
)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know, as in a container that runs as any user."""

    def unknown(user: int) -> NoReturn:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.fixture(scope="module", autouse=True)
def no_shared_arrays() -> None:
    """Drop the arrays that passes of earlier tests shared; another thread may have begun them."""
    device.drop_shared_arrays()


@pytest.fixture(scope="module", autouse=True)
def searched_for_garbage_once() -> None:
    """Keep what earlier modules have left out of all further garbage collections.

    The engine collects garbage at each load, and the heap of a worker grows with each module.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """More workers than processors, because many tests wait for processes to start or end."""
    return (os.cpu_count() or 1) + 3


def pytest_sessionstart() -> None:
    """Configure MLX as a backend does, because the setting is one for all tests of a process."""
    preemption.allow(TEST_LONG)
    device.prepare(device.detect())
    import_mlx_lm()  # it is imported in half the time before a test module imports mlx-lm itself


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep what collection imports out of all garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, object, object]:
    """End the report with a line about what this machine lacks for the skipped tests."""
    result = yield
    skipped = terminalreporter.getreports("skipped")
    if line := left_out(str(report.longrepr[-1]) for report in skipped):
        terminalreporter.write_line(line, yellow=True)
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests in the order above; the others keep their order."""
    places = {HERE / name: place for place, name in enumerate(LONG)}
    if missing := [path for path in places if not path.is_file()]:
        raise pytest.UsageError(f"tests/conftest.py names files that do not exist: {missing}")
    items.sort(key=lambda item: places.get(item.path, len(LONG)))
