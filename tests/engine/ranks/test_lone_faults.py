"""A rank that fails alone is named, and requests that did not need it continue."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


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
        "second load": "5",
        "poison": f"RankLost: {lost}",
        "cause": lost,
    }
