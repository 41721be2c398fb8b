"""The environment variables that the code reads are documented, and the other way round."""

from __future__ import annotations

import re

from tests.install.shell import ROOT

PROGRAMS = ("backend", "cli", "common")
NAME = r"\b(?:MLX_BACKEND|LOCALAI)_[A-Z_]*[A-Z]\b"
# From one process of the backend to another.
INTERNAL = {
    "MLX_BACKEND_LAST_LOAD",
    "MLX_BACKEND_LD_LIBRARY_PATH_BEFORE",
    "MLX_BACKEND_LD_PRELOAD_BEFORE",
    "MLX_BACKEND_PARENT",
    "MLX_BACKEND_RANK_INFO",
    "MLX_BACKEND_RANK_TIMEOUT",
}


def test_the_table_names_the_variables_that_are_read() -> None:
    files = [file for name in PROGRAMS for file in (ROOT / name).rglob("*.py")]
    read = {name for file in files for name in re.findall(NAME, file.read_text("utf-8"))}
    section = (ROOT / "docs" / "options.md").read_text("utf-8").partition("## Environment var")[2]
    assert set(re.findall(NAME, section)) == read - INTERNAL
