"""A disk that is full, gone or never was there, and processes that die."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backend.engine.disk_cache.folder import remove_forgotten
from tests.engine.disk_cache.rows import disk_cache, model_of, saved, words


def test_what_a_killed_process_left_is_removed_in_time(tmp_path: Path) -> None:
    old, new = (tmp_path / f".mlxkv-{digit * 16}.part" for digit in "ab")
    other = tmp_path / "other.part"
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    remove_forgotten(tmp_path)
    assert not old.exists()
    assert new.exists(), "somebody may be writing it"
    assert other.exists()


def test_a_full_disk_is_a_miss_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The system refuses to let files grow, as it does on a full disk."""
    model = model_of("full")
    disk = disk_cache(model, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, limits[1]))
        for start in (1, 2):
            saved(disk, model, words(64, start))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
    assert disk.find([*words(64), 1]) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(tmp_path) not in caplog.text
    saved(disk, model, words(64))
    assert disk.find([*words(64), 1]) is not None, "it goes on when there is room"


def test_a_folder_that_vanishes_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, folder = model_of("full"), tmp_path / "deep" / "folder"
    disk = disk_cache(model, folder)
    saved(disk, model, words(64))
    shutil.rmtree(folder)
    caplog.clear()
    for _ in range(3):
        assert disk.find([*words(64), 1]) is None
        saved(disk, model, words(80))
    assert not folder.exists(), "it may have been another disk"
    assert len(caplog.records) <= 2
    folder.mkdir()
    saved(disk, model, words(80))
    assert disk.find([*words(80), 1]) is not None


def test_a_folder_that_cannot_be_made_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = model_of("full")
    disk = disk_cache(model, tmp_path / "file" / "folder")
    saved(disk, model, words(64))
    assert disk.find([*words(64), 1]) is None


_KILLED = """
import os, sys
from pathlib import Path
from backend.engine.disk_cache.folder import write_whole
def write(file):
    file.write(b"half")
    file.flush()
    os._exit(9)
write_whole(Path(sys.argv[1]), write)
"""


def test_a_process_that_dies_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    model, own = model_of("full"), tmp_path / "own"
    disk = disk_cache(model, None)
    saved(disk, model, words(64), own)
    before = own.read_bytes()
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", _KILLED, str(own)], cwd=root, check=False, timeout=60)
    assert own.read_bytes() == before
    assert disk.find([*words(64), 1], path=own) is not None
    assert len(list(tmp_path.iterdir())) == 2, "the part that was left"
