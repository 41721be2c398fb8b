"""`serve`: which model it serves, under which names, and how it ends if there is none."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli import default_model, serving

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests" / "models"


@contextmanager
def running(*arguments: str, cwd: Path, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """`mlx-backend serve` with these arguments; its standard error is still unread."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MODEL", "MODELS")}
    process = subprocess.Popen(
        [ROOT / "scripts/python", "-m", "cli", "serve", *arguments],
        cwd=cwd,
        env=environment | {"MLX_BACKEND_CACHE": str(cwd / "cache")} | environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=240)


def ended(*arguments: str, cwd: Path, **environ: str) -> tuple[int, str]:
    """The exit code and the last line of a call that serves nothing."""
    with running(*arguments, cwd=cwd, **environ) as process:
        _, errors = process.communicate(timeout=240)
        return process.returncode, errors.strip().splitlines()[-1]


def test_the_reason_for_a_model_that_cannot_be_loaded_is_given_once(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "tiny_text", tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"cut")
    with running("cut", "--port", "0", cwd=tmp_path) as process:
        _, errors = process.communicate(timeout=120)
    (line,) = (line for line in errors.splitlines() if "truncated" in line)
    assert line.startswith("gateway: cut cannot be served: ")


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if match := re.search(r"gateway: listening on (\S+)", line):
            return match[1]
    raise AssertionError(seen)


def ask(url: str, model: str) -> tuple[int, dict[str, Any]]:
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.load(refusal)


def listed(url: str, path: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(url + path, timeout=240) as answer:
        models: list[dict[str, Any]] = json.load(answer)["models"]
        return models


def sizes(url: str) -> list[int]:
    return [model["size"] for model in listed(url, "/api/tags")]


def test_the_model_is_loaded_at_start_and_answers_to_every_spelling_of_its_name(
    tmp_path: Path,
) -> None:
    shutil.copytree(MODELS / "tiny_text", tmp_path / "My Model")
    with running("./My Model", "--port", "0", cwd=tmp_path) as process:
        url = url_of(process)
        assert [model["model"].partition(":")[0] for model in listed(url, "/api/ps")] == [
            "My-Model"
        ]
        for name in ("My-Model", "my-model", "./My Model", str(tmp_path / "My Model")):
            assert ask(url, name)[0] == 200, name
        status, refusal = ask(url, "my-mode")
        assert status == 404
        assert "did you mean 'My-Model'?" in refusal["error"]["message"]


def test_the_context_is_named_and_also_why_it_is_smaller_than_requested(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "tiny_text", tmp_path / "tiny")
    with running("tiny", "--port", "0", "--context-size", "100000", cwd=tmp_path) as process:
        assert process.stderr is not None
        (line,) = (line for line in _until_greeting(process.stderr) if "loaded tiny in" in line)
    assert line.endswith(
        " s, with a context of 8,192 tokens, not 100,000: the model was made for no more\n"
    )


def _until_greeting(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield line
        if "gateway: try:" in line:
            return


def test_a_call_does_not_depend_on_earlier_ones(tmp_path: Path) -> None:
    """Neither a model of the same name elsewhere, nor a folder that did not exist yet."""
    weights = {name: MODELS / name / "model.safetensors" for name in ("tiny_text", "tiny_draft")}
    for folder, model in (("a", "tiny_text"), ("b", "tiny_draft")):
        size = weights[model].stat().st_size
        (tmp_path / folder).mkdir()
        code, line = ended("mymodel", "--port", "0", cwd=tmp_path / folder)
        assert code == 1
        assert line.startswith("gateway: mymodel cannot be served: model 'mymodel' is neither a")
        shutil.copytree(MODELS / model, tmp_path / folder / "mymodel")
        with running("mymodel", "--port", "0", cwd=tmp_path / folder) as process:
            url = url_of(process)
            assert ask(url, "mymodel")[0] == 200
            assert sizes(url) == [size]
        assert not list((tmp_path / folder).rglob("*.yaml"))


@pytest.mark.parametrize("name", ["/nope", "x.gguf", "hub"])
def test_what_is_no_model_ends_the_gateway_with_the_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    code, line = ended(name, "--port", "0", cwd=tmp_path)
    assert code == 1
    assert line.startswith(f"gateway: {name} cannot be served: ")


def test_a_folder_of_models_is_served_by_its_own_option(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "tiny_text", tmp_path / "all" / "tiny")
    code, line = ended("all", "--port", "0", cwd=tmp_path)
    assert (code, line) == (
        2,
        "gateway: all is a folder of models: serve it with --models-dir all",
    )


@pytest.mark.parametrize(
    ("arguments", "environ", "both"),
    [
        (["m", "--models-dir", "all"], {}, "m and --models-dir all"),
        (["m"], {"MODELS": "all"}, "--model and MODELS=all"),
        (["--models-dir=all"], {"MODEL": "m"}, "--models-dir and MODEL=m"),
        ([], {"MODELS": "all", "MODEL": "m"}, "MODELS=all and MODEL=m"),
    ],
)
def test_two_answers_to_what_to_serve_are_an_error(
    arguments: list[str], environ: dict[str, str], both: str, tmp_path: Path
) -> None:
    code, line = ended(*arguments, cwd=tmp_path, **environ)
    assert (code, line) == (2, f"Error: both {both} say what to serve: give only one of them")


def test_the_environment_and_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "ensure", lambda: Path("/cache/it"))
    assert serving.arguments_for(["--port", "1"], {}) == ["--model", "/cache/it", "--port", "1"]
    assert serving.arguments_for([], {"MODEL": "a/b"}) == ["--model", "a/b"]
    assert serving.arguments_for([], {"MODELS": "m"}) == ["--models-dir", "m"]


def test_the_gateways_own_variables_say_what_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "ensure", lambda: pytest.fail("fetched the default model"))
    for name in ("MLX_GATEWAY_MODEL", "MLX_GATEWAY_MODELS_DIR"):
        assert serving.arguments_for(["--port", "1"], {name: "x"}) == ["--port", "1"]
        assert serving.arguments_for(["--model", "y"], {name: "x"}) == ["--model", "y"]
        with pytest.raises(serving.Contradiction, match=f"MODEL=y and {name}=x say"):
            serving.arguments_for([], {name: "x", "MODEL": "y"})


def test_settings_are_checked_before_a_model_is_fetched(tmp_path: Path) -> None:
    """The cache is empty, so the default model would have to be fetched."""
    assert ended("--port=x", cwd=tmp_path) == (2, "Error: --port is 'x': give a whole number")
    assert ended(cwd=tmp_path, MLX_GATEWAY_PORT="x")[0] == 2
    assert not (tmp_path / "cache" / "models").exists()


def test_a_folder_named_by_a_flag_needs_no_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "ensure", lambda: pytest.fail("fetched the default model"))
    for flags in (["--models-dir", "all"], ["--models-dir=all"]):
        assert serving.arguments_for(flags, {}) == flags
