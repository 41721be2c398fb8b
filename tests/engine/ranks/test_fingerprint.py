"""Ranks that differ in their checkpoint or their weights' type are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.engine.errors import ModelRejected, Unusable
from backend.engine.loading.checkpoint import Checkpoint
from backend.engine.ranks.fingerprint import fingerprint, require_alike
from backend.engine.ranks.rank_info import RankInfo
from tests.engine.loading_models import write_model

RANK_INFO = RankInfo(0, 3, ("10.0.0.1", 6000), ("10.0.0.1", "10.0.0.2", "10.0.0.3"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = write_model(tmp_path_factory.mktemp("model"), shards=2)
    return fingerprint(Checkpoint(path, "m", {}, 0), "float32")


def test_equal_ranks_are_accepted(own: dict[str, Any]) -> None:
    require_alike("m", RANK_INFO, [own, own, own])


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ({"files": {}}, r"its config\.json on rank 2 \(10\.0\.0\.3\) differs from that of rank 0"),
        (
            {"dtype": ""},
            (
                r"rank 2 \(10\.0\.0\.3\) would compute in the checkpoint's own type and rank 0 in"
                " float32: set the option dtype"
            ),
        ),
    ],
)
def test_a_rank_that_differs_is_named(
    own: dict[str, Any], differs: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelRejected, match=words):
        require_alike("m", RANK_INFO, [own, own, own | differs])


@pytest.mark.parametrize("at", [0.4, 0.999])
def test_a_changed_byte_is_noticed(at: float, own: dict[str, Any], tmp_path: Path) -> None:
    path = write_model(tmp_path, shards=2)
    assert fingerprint(Checkpoint(path, "m", {}, 0), "float32") == own
    file = path / "model-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[int(at * len(data))] ^= 1
    file.write_bytes(data)
    changed = fingerprint(Checkpoint(path, "m", {}, 0), "float32")
    assert changed["files"].keys() == own["files"].keys()
    assert {name for name, one in changed["files"].items() if one != own["files"][name]} == {
        file.name
    }


def test_a_file_with_another_header_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    with pytest.raises(Unusable, match=r"model\.safetensors is not a safetensors file"):
        fingerprint(Checkpoint(path, "m", {}, 0), "float32")


def test_changed_code_of_the_checkpoint_is_noticed(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    code = path / "own.py"
    checkpoint = Checkpoint(path, "m", {"model_file": code.name}, 0)
    found = []
    for text in ("heads = 2", "heads = 4"):
        code.write_text(text)
        found.append(fingerprint(checkpoint, "float32"))
    with pytest.raises(ModelRejected, match=r"its own\.py on rank 1 \(10\.0\.0\.2\) differs"):
        require_alike("m", RANK_INFO, found)
