"""What makes two models different, and what a request may do with the disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from backend.engine.caching import kv
from backend.engine.disk_cache import identity
from backend.engine.disk_cache.cache import open_disk_cache
from backend.engine.disk_cache.identity import model_digest
from backend.engine.disk_cache.layout import learn_layout
from backend.engine.disk_cache.use import DiskUse, absolute_folder
from backend.engine.errors import InvalidRequest
from backend.engine.settings import Settings
from tests.engine.disk_cache.rows import PATIENCE, entries_in, filled, model_of, saved, words

TINY = Path(__file__).parents[2] / "models" / "tiny_text"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(TINY, copy)
    return copy


def digest(checkpoint: Path, **changes: str) -> str:
    return model_digest(checkpoint, **({"dtype": "float32"} | changes))


def test_a_copy_elsewhere_is_the_same_model(checkpoint: Path) -> None:
    assert digest(checkpoint) == digest(TINY)
    assert len(digest(TINY)) == 32


def test_each_changed_setting_makes_another_model() -> None:
    digests = {
        digest(TINY),
        digest(TINY, dtype="bfloat16"),
        digest(TINY, kv_kind="8 bits"),
        digest(TINY, adapter="8 bits"),
        digest(TINY, device="8 bits"),
    }
    assert len(digests) == 5


@pytest.mark.parametrize("package", ["mlx", "mlx-lm", "mlx-vlm"])
def test_another_version_of_a_library_makes_another_model(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(TINY)
    monkeypatch.setattr(
        identity, "version", lambda name: "0.0.0" if name == package else version(name)
    )
    assert digest(TINY) != before


def test_another_version_of_this_project_makes_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its patches change what the libraries compute."""
    before = digest(TINY)
    monkeypatch.setattr(identity, "VERSION", "9.9.9")
    assert digest(TINY) != before


def edit_json(name: str, key: str, value: Any) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        content = json.loads((checkpoint / name).read_bytes())
        content[key] = value
        (checkpoint / name).write_text(json.dumps(content))

    return edit


def add_code(checkpoint: Path) -> None:
    (checkpoint / "model.py").write_text("pass")


def rename_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-2.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        edit_json("config.json", "rope_theta", 5.0),
        edit_json("tokenizer.json", "version", "2.0"),
        add_code,
        rename_weights,
    ],
)
def test_each_changed_file_makes_another_model(
    change: Callable[[Path], None], checkpoint: Path
) -> None:
    change(checkpoint)
    assert digest(checkpoint) != digest(TINY)


def test_a_change_in_any_one_tensor_makes_another_model(checkpoint: Path) -> None:
    """Fine-tuning one layer keeps all names and sizes."""
    weights = mx.load(str(TINY / "model.safetensors"))
    assert isinstance(weights, dict)
    path = str(checkpoint / "model.safetensors")
    mx.save_safetensors(path, weights)
    digests = {digest(checkpoint)}
    for name in weights:
        mx.save_safetensors(path, weights | {name: weights[name] + 1})
        digests.add(digest(checkpoint))
    assert len(digests) == len(weights) + 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_start_the_middle_and_the_end_of_a_tensor_are_hashed(
    place: int, tmp_path: Path
) -> None:
    digests = set()
    for value in (0.0, 1.0):
        weight = mx.zeros(10_001)
        weight[[0, 5_000, 10_000][place]] = value
        mx.save_safetensors(str(tmp_path / "model.safetensors"), {"weight": weight})
        digests.add(digest(tmp_path))
    assert len(digests) == 2


def test_a_restarted_model_finds_its_entries_and_another_does_not(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = model_of("full")
    settings = Settings(prompt_cache_dir=str(tmp_path / "caches"))

    def opened(**changes: str) -> Any:
        disk = open_disk_cache(
            model, checkpoint, settings, copy=False, **({"dtype": "float32"} | changes)
        )
        assert disk is not None
        return disk

    saved(opened(), model, words(64))
    prompt = [*words(64), 1]
    assert opened().find(prompt) is not None
    for changes in ({"adapter": "b"}, {"kv_kind": "8 bits"}, {"dtype": "f16"}, {"device": "gpu"}):
        assert opened(**changes).find(prompt) is None
    (checkpoint / "config.json").write_text("{}")
    assert opened().find(prompt) is None


def test_settings_limit_the_folder(checkpoint: Path, tmp_path: Path) -> None:
    model, folder = model_of("full"), tmp_path / "caches"
    settings = Settings(prompt_cache_dir=str(folder), prompt_cache_disk_mib=1)
    disk = open_disk_cache(model, checkpoint, settings, dtype="float32", copy=False)
    assert disk is not None
    row = filled(model, words(4032))
    for start in range(2):
        tokens = [start + 1, *words(4031)]
        disk.save(tokens, row, trimmable=kv.can_trim(row))
        assert disk.drain(PATIENCE)
    assert [path.stat().st_size > 1 << 19 for path in entries_in(folder)] == [True]


class OwnCache(KVCache):  # type: ignore[misc]  # mlx-lm is untyped
    """A cache of an unknown kind."""


def test_a_model_with_unknown_caches_is_served_without_a_disk(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("full")
    monkeypatch.setattr(kv, "new_row", lambda model: [OwnCache() for _ in model.layers])
    assert learn_layout(model) is None
    assert open_disk_cache(model, checkpoint, Settings(), dtype="float32", copy=False) is None


def test_a_checkpoint_that_cannot_be_read_is_served_without_a_disk(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"short")
    disk = open_disk_cache(model_of("full"), tmp_path, Settings(), dtype="float32", copy=False)
    assert disk is None


@pytest.mark.parametrize("text", ["caches", "./caches", "~/caches", "/", "/a\0b"])
def test_a_relative_path_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="PromptCachePath must be an absolute path"):
        absolute_folder("PromptCachePath", text)
    with pytest.raises(InvalidRequest, match="prompt_cache_dir must be an absolute path"):
        absolute_folder("prompt_cache_dir", text)


def test_no_path_means_no_disk_cache() -> None:
    assert absolute_folder("prompt_cache_dir", "") is None
    assert absolute_folder("PromptCachePath", " ") is None
    assert absolute_folder("PromptCachePath", "/models/a") == Path("/models/a")


@pytest.mark.parametrize(
    ("use", "prompt_trimmable", "prompt_whole", "answer"),
    [
        (DiskUse(), True, True, False),
        (DiskUse(answer=True), False, True, True),
        (DiskUse(Path("/a")), True, True, False),
        (DiskUse(Path("/a"), answer=True), False, True, True),
        (DiskUse(answer=True, read_only=True), False, False, False),
        (DiskUse(read_only=True), False, False, False),
    ],
)
def test_when_a_request_is_saved(
    use: DiskUse, prompt_trimmable: bool, prompt_whole: bool, answer: bool
) -> None:
    assert use.saves_prompt(trimmable=True) is prompt_trimmable
    assert use.saves_prompt(trimmable=False) is prompt_whole
    assert use.saves_answer is answer
