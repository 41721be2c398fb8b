"""The models folder of `make serve`: which files it writes, and which it never changes."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
import yaml

from demo import default_model, serve


def test_a_model_gets_its_own_context() -> None:
    assert "context_size" not in serve.model_file("mlx-community/Qwen3-0.6B-4bit")[1]


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
        config = yaml.safe_load((folder / name).read_text())
        assert config["parameters"]["model"] == place
        assert config["name"] + ".yaml" == name
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


def test_a_folder_named_by_a_flag_needs_no_default_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def execute(_: str, command: list[str]) -> NoReturn:
        started.append(command)
        raise SystemExit

    monkeypatch.setattr("os.execv", execute)
    monkeypatch.setattr("common.launch.hold_interrupts", lambda: None)
    monkeypatch.setattr(default_model, "ensure", lambda: pytest.fail("fetched the default model"))
    for flags in (["--models-dir", str(tmp_path)], [f"--models-dir={tmp_path}"]):
        monkeypatch.setattr("sys.argv", ["serve", *flags])
        with pytest.raises(SystemExit):
            serve.main()
        assert started.pop()[3:] == flags


def test_help_fetches_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(default_model, "ensure", lambda: pytest.fail("fetched the default model"))
    monkeypatch.setattr("sys.argv", ["serve", "--help"])
    with pytest.raises(SystemExit):
        serve.main()
    assert capsys.readouterr().out.startswith("usage: make serve [MODEL=…")
