"""What holds for all tests: how hypothesis searches, and which files come first.

The files that take minutes come first, so that all workers stay busy.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.long import TEST_LONG

# A machine that stalls says nothing about the code. A sample is the same at every run.
settings.register_profile(
    "unhurried",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not TEST_LONG,
    max_examples=100 if TEST_LONG else 50,
)
settings.load_profile("unhurried")

HERE = Path(__file__).parent
LONG = (
    "engine/executing/test_executor_faults.py",
    "engine/vision/test_families.py",
    "acceptance/test_hanging.py",
    "architectures/test_architectures.py",
    "gateway/test_supervisor_failures.py",
    "engine/test_scheduler.py",
    "engine/planning/test_planner.py",
    "clients/test_conformance.py",
    "clients/test_openai.py",
    "engine/test_parity.py",
    "acceptance/test_fuzz.py",
    "clients/test_schemathesis.py",
    "install/test_install.py",
    "gateway/test_crowd.py",
    "gateway/test_supervisor.py",
    "gateway/page/test_page_chat.py",
    "acceptance/test_restart.py",
    "clients/test_lm_eval.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order above; all others as they were found."""
    places = {HERE / name: place for place, name in enumerate(LONG)}
    if missing := [path for path in places if not path.is_file()]:
        raise pytest.UsageError(f"tests/conftest.py names files that do not exist: {missing}")
    items.sort(key=lambda item: places.get(item.path, len(LONG)))
