"""Ranks that divide a model give the same answers as one process with the whole model.

`make test` plays one schedule with two models. `make test-long` plays 100 with every model that
mlx-lm divides, in every way, on two and on three ranks, in about half an hour; RANK_SCHEDULES sets
another number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks.divided_models import WAYS
from tests.long import TEST_LONG

ROOT = Path(__file__).parents[3]
SCHEDULES = int(os.environ.get("RANK_SCHEDULES", "100" if TEST_LONG else "0"))
EVERY = [f"{name}:{way}" for name, ways in WAYS.items() for way in ways]
FEW = ["qwen2:pipeline", "qwen3_5:tensor"]

pytestmark = [
    pytest.mark.timeout(40_000 if SCHEDULES else 600),
    pytest.mark.usefixtures("yielding"),
]


@pytest.mark.parametrize("size", [2, 3] if SCHEDULES else [2])
def test_every_row_gets_the_same_tokens_as_in_one_process(size: int, tmp_path: Path) -> None:
    asked = EVERY if SCHEDULES else FEW
    program = [sys.executable, "-m", "tests.engine.ranks.equality"]
    played = subprocess.run(
        [*program, str(size), str(SCHEDULES or 1), str(tmp_path), *asked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert played.returncode == 0, played.stderr[-4000:]
    found = [json.loads(line) for line in played.stdout.splitlines()]
    assert [one["model"] for one in found] == asked
    for one in found:
        print(_line(one))
    for one in found:
        assert one["different"] == [], played.stderr[-4000:]
        assert len(one["shards"]) == size
        assert max(one["shards"]) < one["whole"]
    seen = [one["seen"] for one in found]
    for what in ("rows served from the prefix cache", "rows preempted", "passes shared"):
        assert sum(each.get(what, 0) for each in seen) > 0, what


def _line(found: dict[str, Any]) -> str:
    return (
        f"{found['model']} on {found['ranks']} ranks: {found['schedules']} schedules,"
        f" {found['tokens']} tokens compared, {len(found['different'])} schedules differ"
    )
