"""The queue in front of the disk, a disk that is full or missing, and processes that die."""

from __future__ import annotations

import gc
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.engine.caching import kv
from backend.engine.caching.layer_kv import LayerKV
from backend.engine.disk_cache import prefix_folder as folder_module
from backend.engine.disk_cache.cache import DiskCache, Writer
from backend.engine.disk_cache.layout import learn_layout
from backend.engine.disk_cache.prefix_folder import Folder, Prefix, StoredPrefix, write_file
from backend.engine.planning.prefix_index import PrefixKey
from backend.engine.units import MIB
from tests.engine.disk_cache.rows import (
    IDENTITY,
    PATIENCE,
    disk_cache,
    entries_in,
    filled,
    model_of,
    saved,
    words,
)


class Gated(Writer):
    """A writer that waits at a gate, writes nothing, and records what it would have written."""

    def __init__(self, max_waiting: int = 100) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.written: list[str] = []
        gate, begun, written = self.gate, self.begun, self.written

        def write(save: StoredPrefix) -> None:
            begun.set()
            assert gate.wait(PATIENCE)
            written.append(shown(save))

        super().__init__(write, max_waiting)

    def begin(self) -> None:
        """Start a save, so that the next ones wait."""
        assert self.put(save_of("zz", size=1))
        assert self.begun.wait(PATIENCE)

    def rest(self) -> list[str]:
        """Let all saves finish; returns what was written after the one that `begin` started."""
        self.gate.set()
        assert self.drain(PATIENCE)
        return self.written[1:]


def save_of(
    text: str, size: int = 10, path: Path | None = None, *, trimmable: bool = True
) -> StoredPrefix:
    prefix = Prefix(PrefixKey(list(text.encode())), trimmable)
    return StoredPrefix(prefix, [mx.zeros(size, mx.uint8)], [], path)


def thread_of(writer: Writer) -> threading.Thread | None:
    return writer._thread


def shown(save: StoredPrefix) -> str:
    return bytes(save.prefix.key.tokens.tolist()).decode()


def test_a_save_that_does_not_fit_is_dropped_and_waiting_ones_stay() -> None:
    writer = Gated(max_waiting=25)
    writer.begin()
    assert [writer.put(save_of(text)) for text in "abc"] == [True, True, False]
    assert writer.nbytes == 21
    assert writer.rest() == ["a", "b"]
    assert writer.nbytes == 0


def test_one_save_may_be_larger_than_the_limit() -> None:
    writer = Gated(max_waiting=5)
    writer.gate.set()
    assert writer.put(save_of("a", size=50))
    assert writer.drain(PATIENCE)
    assert writer.written == ["a"]


def test_a_conversation_that_grows_while_it_waits_is_written_once() -> None:
    writer = Gated(max_waiting=31)
    writer.begin()
    assert writer.put(save_of("ab"))
    assert writer.put(save_of("x"))
    assert writer.put(save_of("abc", size=20))
    assert writer.put(save_of("abc", size=20)), "it waits already"
    assert writer.rest() == ["x", "abc"]


def test_checkpoints_do_not_replace_each_other() -> None:
    writer = Gated()
    writer.begin()
    for text in ("ab", "abc"):
        assert writer.put(save_of(text, trimmable=False))
    assert writer.rest() == ["ab", "abc"]


def test_saves_for_other_folders_do_not_replace_each_other() -> None:
    writer = Gated()
    writer.begin()
    for text, path in (("a", "one"), ("ab", "two"), ("ab", "one"), ("abc", None)):
        assert writer.put(save_of(text, path=Path(path) if path else None))
    assert writer.rest() == ["ab", "ab", "abc"]


def test_a_close_with_time_writes_everything_and_accepts_nothing_more() -> None:
    writer = Gated()
    writer.gate.set()
    for text in "abc":
        assert writer.put(save_of(text))
    writer.close(PATIENCE)
    assert writer.written == ["a", "b", "c"]
    assert not writer.put(save_of("d"))


def test_a_close_without_time_drops_what_has_not_begun() -> None:
    writer = Gated()
    writer.begin()
    assert writer.put(save_of("a"))
    writer.close(0)
    writer.close(0)
    assert writer.rest() == []


def test_the_thread_exists_only_while_there_is_work() -> None:
    writer = Gated()
    assert thread_of(writer) is None
    writer.begin()
    assert thread_of(writer) is not None
    assert writer.rest() == []
    assert thread_of(writer) is None


def test_without_a_thread_nothing_is_kept_in_memory(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, folder = model_of("full"), tmp_path / "folder"
    row, layout = filled(model, words(80)), learn_layout(model)
    assert layout is not None
    limit: pytest.MonkeyPatch = request.getfixturevalue("no_more_threads")
    disk = DiskCache(layout, IDENTITY, folder, 64 * MIB, copy=False)
    disk.save(words(80), row, trimmable=True)
    assert disk.writing_bytes == 0
    assert disk.drain(0)
    limit.undo()
    saved(disk, model, words(80))
    assert len(entries_in(folder)) == 1


def test_a_writer_without_an_owner_finishes_and_ends() -> None:
    writer = Gated()
    writer.begin()
    written, gate = writer.written, writer.gate
    assert writer.put(save_of("a"))
    reference, thread = weakref.ref(writer), thread_of(writer)
    assert thread is not None
    del writer
    gate.set()
    thread.join(PATIENCE)
    assert written == ["zz", "a"]
    gc.collect()
    assert reference() is None


def test_waiting_saves_outlive_the_engine_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the process the engine thread ends first, and its streams with it."""
    gate = threading.Event()
    disk = disk_cache(model_of("full"), tmp_path)

    def slowly(*entry: Any) -> None:
        assert gate.wait(PATIENCE)
        write_file(*entry)

    monkeypatch.setattr(folder_module, "write_file", slowly)

    def engine() -> None:
        row = [LayerKV()]
        row[0].update_and_fetch(*(mx.random.normal((1, 2, 64, 8)) for _ in range(2)))
        kv.evaluate(row)
        disk.save(words(64), row * 2, trimmable=True)
        mx.clear_streams()

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join(PATIENCE)
    assert not entries_in(tmp_path)
    gate.set()
    disk.close(PATIENCE)
    assert disk_cache(model_of("full"), tmp_path).find([*words(64), 1]) is not None


def test_files_left_by_a_killed_process_are_removed_later(tmp_path: Path) -> None:
    unfinished = tmp_path / ".unfinished"
    unfinished.mkdir()
    old, new, future = (unfinished / name for name in "abc")
    other = tmp_path / "other.part"
    for path in (old, new, future, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    os.utime(future, (time.time() + 7200,) * 2)
    Folder(tmp_path, IDENTITY, [], MIB).evict()
    assert not old.exists()
    assert not future.exists(), "the clock has been set back since"
    assert new.exists(), "another process may be writing it"
    assert other.exists()


def test_a_full_disk_is_a_miss_and_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The system refuses to let files grow, as on a full disk."""
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
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert disk.find([*words(64), 1]) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(tmp_path) not in caplog.text
    saved(disk, model, words(64))
    assert disk.find([*words(64), 1]) is not None, "it goes on when there is room"


def test_a_deleted_folder_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_folder_that_cannot_be_created_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = model_of("full")
    disk = disk_cache(model, tmp_path / "file" / "folder")
    saved(disk, model, words(64))
    assert disk.find([*words(64), 1]) is None


_KILLED = """
import os, sys
from pathlib import Path
from backend.engine.disk_cache import prefix_folder
from tests.engine.disk_cache.rows import disk_cache, model_of, saved, words
def write(path, *entry):
    path.write_bytes(b"half")
    os._exit(9)
prefix_folder.write_file = write
saved(disk_cache(model_of("full"), Path(sys.argv[1])), model_of("full"), words(90))
"""


def test_a_process_that_dies_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    model = model_of("full")
    saved(disk_cache(model, tmp_path), model, words(64))
    (old,) = entries_in(tmp_path)
    before = old.read_bytes()
    root = Path(__file__).parents[3]
    killed = [sys.executable, "-c", _KILLED, str(tmp_path)]
    assert subprocess.run(killed, cwd=root, check=False, timeout=60).returncode == 9
    assert old.read_bytes() == before
    assert entries_in(tmp_path) == [old]
    assert len(list((tmp_path / ".unfinished").iterdir())) == 1, "the part that was left"
    assert disk_cache(model, tmp_path).find([*words(64), 1]) is not None
