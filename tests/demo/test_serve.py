"""The models folder of `make serve`: which files it writes, and which it never changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from demo import default_model, serve


def test_a_users_folder_is_served_unchanged(tmp_path: Path) -> None:
    assert serve.models_folder({"MODELS": str(tmp_path)}) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_named_model_gets_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_BACKEND_CACHE", str(tmp_path / "cache"))
    checkpoint = tmp_path / 'my "own" model'
    checkpoint.mkdir()
    for reference, place in (
        (str(checkpoint), str(checkpoint)),
        ("mlx-community/Qwen3-0.6B-4bit", "mlx-community/Qwen3-0.6B-4bit"),
    ):
        folder = serve.models_folder({"MODEL": reference})
        name, _ = serve.model_file(reference)
        told = yaml.safe_load((folder / name).read_text())
        assert told["parameters"]["model"] == place
        assert told["name"] + ".yaml" == name
        assert [file.name for file in folder.iterdir()] == [name]
    (folder / name).write_text("mine")
    assert serve.models_folder({"MODEL": "else/Qwen3-0.6B-4bit"}) != folder
    serve.models_folder({"MODEL": "mlx-community/Qwen3-0.6B-4bit"})
    assert (folder / name).read_text() == "mine"


def test_without_a_model_it_is_the_default_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = default_model.ensure()
    monkeypatch.setattr(default_model, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(default_model, "ensure", lambda: model)
    folder = serve.models_folder({})
    [file] = folder.iterdir()
    assert yaml.safe_load(file.read_text())["parameters"]["model"] == str(model)
