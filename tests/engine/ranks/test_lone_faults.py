"""A rank that fails alone is named, and requests that did not need it continue."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("yielding")


def test_a_rank_that_fails_alone_is_named(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.ranks.lone_faults", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    lost = "rank 1 (here) failed: RuntimeError: injected"
    assert json.loads(ran.stdout) == {
        "first load": "ModelRejected: rank 1 (here): model 'model' cannot be loaded:"
        " its disk is on fire",
        "other weights": "ModelRejected: model 'model' cannot be loaded: its model.safetensors on"
        " rank 1 (here) differs from that of rank 0: copy the same checkpoint to every rank",
        "third load": "5",
        "poison": f"RankLost: {lost}",
        "cause": lost,
    }


def _ran(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.engine.ranks.ended_loads", str(folder), what],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_a_cancelled_load_keeps_no_rank_waiting(tmp_path: Path) -> None:
    """No rank waits in a collective or for the other's report."""
    ran = _ran(tmp_path, "cancelled")
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout) == {"tokens": 5, "causes": []}


def test_a_rank_that_waits_in_a_collective_for_one_that_refused_ends_with_its_reason(
    tmp_path: Path,
) -> None:
    ran = _ran(tmp_path, "refused")
    assert ran.returncode == 1
    assert (
        "the group of ranks has failed: rank 1 (here) refused the load while rank 0 computed: model"
        " 'model' cannot be loaded: its first pass is refused" in ran.stderr
    )


def test_what_a_load_leaves_for_later_keeps_the_stored_prefixes_of_all_ranks(
    tmp_path: Path,
) -> None:
    """The planner of rank 0 refers to them by number."""
    ran = _ran(tmp_path, "later")
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout) == {"cached": 19, "causes": []}
