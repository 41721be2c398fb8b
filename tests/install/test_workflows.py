"""The workflows run commands that exist, with every Python that install.sh accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.install.shell import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(file.read_text())["jobs"]
    return loaded


def commands(file: Path) -> Iterator[str]:
    for job in jobs(file).values():
        for step in job["steps"]:
            yield from step.get("run", "").splitlines()


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_the_commands_exist(file: Path) -> None:
    lines = "\n".join(commands(file))
    assert set(re.findall(r"\bmake ([a-z-]+)", lines)) <= TARGETS
    for path in re.findall(r"(?<![\w./-])scripts/[\w./-]+", lines):
        assert (ROOT / path).exists(), path


def test_the_tests_run_with_every_supported_python() -> None:
    text = (ROOT / "install.sh").read_text()
    supported = re.findall(r'"(3\.\d\d) 64bit"', text)
    matrix = jobs(ROOT / ".github" / "workflows" / "test.yml")["linux"]["strategy"]["matrix"]
    assert matrix["python"] == sorted(set(supported))
