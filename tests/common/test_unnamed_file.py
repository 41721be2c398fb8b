"""Passing data to child processes needs no folder for temporary files."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from common.unnamed_file import unnamed_file


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files in memory")
def test_no_folder_for_temporary_files_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with os.fdopen(unnamed_file("test"), "w+b") as file:
        file.write(b"content")
        file.seek(0)
        assert file.read() == b"content"
