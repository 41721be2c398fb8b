"""The commands and model files of docs/localai.md, as far as they can be run without LocalAI.

Covers: docs/localai.md, docs/distributed.md
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend.rpc.load_options import load_request
from gateway.models.config import ModelConfig
from gateway.supervisor.instance import load_request as wire_request
from tests.gateway.gateway_process import ROOT

DOCUMENT = (ROOT / "docs" / "localai.md").read_text()
DISTRIBUTED = (ROOT / "docs" / "distributed.md").read_text()
FILES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)]
MODELS = [file for file in FILES if isinstance(file, dict) and file.get("backend") == "mlx"]
# LocalAI copies a package and gives it an alias; `uninstall` of an alias removes both.
LOCAL_AI = """#!/bin/sh
set -eu
case "$1 $2" in
"backends install")
    mkdir -p backends
    cp -r "$3" "backends/$4"
    echo '{"name": "'"$4"'", "alias": "'"$5"'"}' >"backends/$4/metadata.json" ;;
"backends uninstall")
    grep -l '"alias": "'"$3"'"' backends/*/metadata.json | xargs -n 1 dirname | xargs rm -r ;;
*) exit 2 ;;
esac
"""


def commands(document: str, title: str) -> list[str]:
    """The indented commands of a section."""
    section = re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", document, re.DOTALL | re.MULTILINE)
    assert section is not None, title
    return re.findall(r"^    (\S.*)$", section[1], re.MULTILINE)


INSTALL = commands(DOCUMENT, "Install")[1:3]  # after `make package`


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, with a `local-ai` and what `make demo` and `make package` have made."""
    for place in ("home/.cache/mlx-backend/models/SmolLM2-135M-Instruct", "package", "bin", "new"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "home/.cache/mlx-backend/models/SmolLM2-135M-Instruct/config.json").write_text("{}")
    (tmp_path / "package" / "run.sh").write_text("")
    (tmp_path / "bin" / "local-ai").write_text(LOCAL_AI)
    (tmp_path / "bin" / "local-ai").chmod(0o755)
    return tmp_path / "new"


def run(folder: Path, *lines: str) -> None:
    above = folder.parent
    text = "\n".join(["set -eu", *lines]).replace("/path/to/build/package", str(above / "package"))
    environ = {"PATH": f"{above / 'bin'}:{os.environ['PATH']}", "HOME": str(above / "home")}
    subprocess.run(["sh", "-c", text], cwd=folder, env=environ, check=True)


def test_the_commands_make_a_model_and_a_backend(folder: Path) -> None:
    run(folder, *INSTALL, commands(DOCUMENT, "A model")[0])
    assert (folder / "models" / "SmolLM2-135M-Instruct" / "config.json").exists()
    assert (folder / "backends" / "mlx-backend" / "run.sh").exists()


@pytest.mark.parametrize(
    ("document", "title"), [(DOCUMENT, "Vision models"), (DISTRIBUTED, "LocalAI")]
)
def test_a_second_name_refers_to_the_installed_backend(
    folder: Path, document: str, title: str
) -> None:
    run(folder, *INSTALL, *commands(document, title)[:2])
    installed, second = sorted(folder.glob("backends/*/metadata.json"))
    assert json.loads(second.read_text()) == {
        "name": second.parent.name,
        "meta_backend_for": json.loads(installed.read_text())["name"],
    }


@pytest.mark.parametrize("file", MODELS, ids=lambda file: str(file["name"]))
def test_a_model_file_loads(file: dict[str, Any]) -> None:
    """The gateway accepts LocalAI's files, and sends what LocalAI would send."""
    if "score" in file["known_usecases"]:  # with templates that only LocalAI applies
        file = {**file, "template": {"use_tokenizer_template": True}}
    config = ModelConfig.model_validate(file)
    assert config.name == file["name"]
    wire = wire_request(config, Path("models"))
    if not config.context_size:
        wire.ContextSize = 4096  # as LocalAI does
    request, warnings = load_request(wire)
    assert warnings == []
    assert request.context_size == config.context_size
    assert request.context_size or "context:max" in config.options


def test_every_kind_of_call_has_a_file() -> None:
    usecases = {usecase for file in MODELS for usecase in file["known_usecases"]}
    texts = {"chat", "vision", "embeddings", "rerank", "token_classify", "score"}
    assert usecases == texts | {"transcript"}


def test_the_router_names_files_of_the_document() -> None:
    (router,) = (file["router"] for file in FILES if "router" in file)
    names = {file["name"] for file in MODELS}
    assert {router["classifier_model"], router["fallback"]} <= names
    assert {candidate["model"] for candidate in router["candidates"]} <= names
    labels = {policy["label"] for policy in router["policies"]}
    assert {label for one in router["candidates"] for label in one["labels"]} == labels
