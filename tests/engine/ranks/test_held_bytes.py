"""A rank reads, and has in memory, only its part of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("yielding")
NEAR = 0.1


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.ranks.held_bytes", str(tmp_path_factory.mktemp("m"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("case", "shares", "words"),
    [
        ("tensor", (1 / 2, 1 / 2), ["part 1 of 2 of every layer", "part 2 of 2 of every layer"]),
        ("pipeline", (5 / 9, 4 / 9), ["layers 4-8 of 9", "layers 0-3 of 9"]),
        ("uneven", (3 / 9, 6 / 9), ["layers 6-8 of 9", "layers 0-5 of 9"]),
    ],
)
def test_a_rank_holds_its_share(
    case: str, shares: tuple[float, float], words: list[str], found: Any
) -> None:
    """The last layers are rank 0's; all ranks have the weights outside layers (embeddings)."""
    one = found[case]
    assert one["words"] == words
    expected = [one["everywhere"] + share * one["layers"] for share in shares]
    assert one["shards"] == [pytest.approx(each, rel=NEAR) for each in expected]
    assert one["held"] == pytest.approx(expected[0], rel=NEAR)
    whole = one["everywhere"] + one["layers"]
    assert one["peak"] < 0.9 * whole
    if case != "tensor" and one["read"]:  # a part of every tensor is read with the whole tensor
        assert one["read"] == pytest.approx(expected[0], rel=NEAR)
