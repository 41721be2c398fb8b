"""There is one version number, and every program reports it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from common.version import VERSION

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("module", "name"), [("backend", "mlx-backend"), ("gateway", "gateway")])
def test_a_program_reports_it(module: str, name: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout.strip()) == (0, f"{name} {VERSION}"), answer.stderr


def test_the_project_reads_its_version_from_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "common/version.py"


def test_the_changelog_has_an_entry_for_it() -> None:
    assert f"\n## {VERSION}\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")
