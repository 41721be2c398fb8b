"""The prompt cache on disk of a loaded model: KV that survives a restart of the process.

Three kinds of threads use the cache. Prompt threads call `find`, wait for the disk and get buffers
without MLX. The engine thread turns buffers into KV (`restore`) and queues KV for writing (`save`);
it never waits for the disk. The writer's thread writes and evicts.

All of this work is optional: any failure is a cache miss, and at most one line in the log.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from backend.engine.caching import kv
from backend.engine.disk_cache.identity import model_digest
from backend.engine.disk_cache.layout import Layers, fits, learn_layout, pack, unpack
from backend.engine.disk_cache.prefix_folder import Folder, Prefix, StoredPrefix, candidates, reason
from backend.engine.disk_cache.use import absolute_folder
from backend.engine.planning.prefix_index import PrefixKey
from backend.engine.settings import Settings
from backend.engine.units import MIB

_log = logging.getLogger(__name__)
# To compute fewer tokens takes about as long as to find, read and check a file.
LEAST_TOKENS = 64
_MOST_WAITING = 1 << 30  # bytes of KV waiting to be written, and of KV waiting to be restored
_MOST_OPENED = 64
_SEARCH_SECONDS = 60.0  # after which a request no longer waits for the disk


class Writer:
    """A queue of prefixes, of `most` bytes, and its thread, which calls `write` for each prefix.

    The thread references the writer, so a writer without an owner still finishes its work.
    """

    def __init__(self, write: Callable[[StoredPrefix], None], most: int) -> None:
        self._write = write
        self._most = most
        self._changed = threading.Condition()
        self._saves: list[StoredPrefix] = []  # the first is being written
        self._closing = self._failing = False
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of KV that are queued or being written."""
        return sum(save.nbytes for save in self._saves)

    def put(self, save: StoredPrefix) -> bool:
        """Queue a prefix instead of those that it replaces; return False if it does not fit."""
        with self._changed:
            begun, queued = self._saves[:1], self._saves[1:]
            remaining = begun + [
                other
                for other in queued
                if other.path != save.path or not save.prefix.covers(other.prefix)
            ]
            waiting = sum(other.nbytes for other in remaining)
            if self._closing or (waiting and waiting + save.nbytes > self._most):
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._main, name="disk", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system refuses another thread
                    return False
                self._thread = thread
            self._saves = [*remaining, save]
            return True

    def drain(self, timeout: float) -> bool:
        """Wait until the queue is empty, and return False after `timeout` seconds.

        May not be called on the engine thread.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def close(self, timeout: float) -> None:
        """Accept no more prefixes, and drop waiting prefixes after `timeout` seconds.

        Blocks for little longer than `timeout`, so with 0 any thread may call this method.
        """
        with self._changed:
            self._closing = True
        if not self.drain(timeout):
            with self._changed:
                self._saves = self._saves[:1]

    def _main(self) -> None:
        while save := self._next():
            try:
                self._write(save)
                self._failing = False
            except (OSError, SafetensorError) as fault:
                level = logging.DEBUG if self._failing else logging.WARNING
                self._failing = True
                _log.log(level, "a prompt cache cannot be written to disk: %s", reason(fault))
            except Exception:
                _log.warning("storing a prompt cache on disk failed", exc_info=True)
            with self._changed:
                self._saves = self._saves[1:]

    def _next(self) -> StoredPrefix | None:
        """Return the next prefix; None if there is none, after which the thread must end."""
        with self._changed:
            if self._saves:
                return self._saves[0]
            self._thread = None
            self._changed.notify_all()
            return None


@dataclass(eq=False)
class DiskCache:
    """The KV of earlier prompts in files.

    The cache has no reference to the model, and references rows only until they are written.
    """

    layout: Layers  # the result of `learn_layout`
    identity: str  # the result of `model_digest`
    # The folder for all requests; None means that only folders named by requests are used.
    folder: Path | None
    max_bytes: int  # maximum size of the files in a folder
    _: KW_ONLY
    copy: bool  # as for `layout.pack`
    # Maximum bytes of KV that waits to be written, and of KV that waits to be restored.
    max_waiting: int = _MOST_WAITING

    def __post_init__(self) -> None:
        # Folders are stored, because they remember the files that they have read.
        self._open = lru_cache(_MOST_OPENED)(
            lambda path: Folder(path, self.identity, self.layout, self.max_bytes)
        )
        self._folder = self._open(self.folder) if self.folder else None
        self._made = False  # whether the folder has been created
        self._writer = Writer(self._write, self.max_waiting)
        self.drain, self.close = self._writer.drain, self._writer.close
        self._turn = threading.Lock()  # only one search runs at any time
        self._search = threading.Thread()
        self._read: list[weakref.ref[StoredPrefix]] = []

    @property
    def writing_bytes(self) -> int:
        """Bytes of KV that waits to be written. May be called on any thread."""
        return self._writer.nbytes

    @property
    def read_bytes(self) -> int:
        """Bytes of KV that was read and waits to be restored. May be called on any thread."""
        return sum(stored.nbytes for reference in self._read if (stored := reference()))

    def has_files(self, path: Path | None) -> bool:
        """Return whether there is a folder in which `find` can look."""
        return self._folder is not None or path is not None

    def find(
        self,
        prompt: Sequence[int],
        *,
        path: Path | None = None,
        in_memory: int = 0,
        free: float = math.inf,
    ) -> StoredPrefix | None:
        """Find the longest prefix of a prompt in an intact file. Runs on prompt threads.

        If the disk does not answer, the search is abandoned, and no other starts until it ends.

        free: free bytes of memory, including the bytes of files that wait to be restored.
        """
        found: list[StoredPrefix | None] = []

        def run() -> None:
            try:
                found.append(self._find(PrefixKey(prompt), path, in_memory, free))
            except Exception:
                _log.warning("looking for a prompt cache on disk failed", exc_info=True)

        with self._turn, suppress(RuntimeError):  # the system may refuse another thread
            if not self._search.is_alive():
                self._search = threading.Thread(target=run, name="disk-search", daemon=True)
                self._search.start()
                self._search.join(_SEARCH_SECONDS)
                if self._search.is_alive():
                    _log.warning("prompt caches are not read until the disk answers again")
                elif found:
                    return found[0]
        return None

    def _find(
        self, prompt: PrefixKey, path: Path | None, in_memory: int, free: float
    ) -> StoredPrefix | None:
        folders = [folder for folder in (self._folder, path and self._open(path)) if folder]
        files = {file: folder for folder in folders for file in folder.refresh()}
        waiting = self.read_bytes
        most = min(free - waiting, self.max_bytes)
        if waiting:  # a single file may use the whole budget
            most = min(most, self.max_waiting - waiting)
        for file in candidates(files, prompt, in_memory, LEAST_TOKENS, most):
            if stored := files[file].read(file, prompt):
                self._read = [
                    *(reference for reference in self._read if reference()),
                    weakref.ref(stored),
                ]
                _log.debug("the disk cache has %d of %d tokens", stored.length, len(prompt))
                return stored
        return None

    def restore(self, stored: StoredPrefix, row: kv.RowCache) -> kv.RowCache | None:
        """Fill a new row with `stored.length` tokens, and return it; None on failure."""
        try:
            unpack(self.layout, stored.arrays, stored.numbers, row)
            if kv.trim(row, len(stored.prefix.key) - stored.length):
                kv.start_copies([row])
                return row
        except Exception:
            _log.warning("restoring a prompt cache from disk failed", exc_info=True)
        return None

    def save(
        self, tokens: Sequence[int], row: kv.RowCache, *, trimmable: bool, path: Path | None = None
    ) -> None:
        """Queue a prefix for writing.

        row: evaluated KV of exactly `tokens`. Clones of the row may be extended meanwhile.
        """
        if len(tokens) < LEAST_TOKENS or not self.has_files(path):
            return
        try:
            prefix = Prefix(PrefixKey(tokens), trimmable)
            save = StoredPrefix(prefix, *pack(row, copy=self.copy), path)
            if not fits(self.layout, save.arrays, save.numbers, len(tokens)):
                _log.debug("a prefix is not stored on disk: this kind of KV cannot be stored")
            elif save.nbytes > self.max_bytes or not self._writer.put(save):
                _log.debug(
                    "a prefix of %d bytes is not stored on disk: it does not fit", save.nbytes
                )
        except Exception:
            _log.warning("storing a prompt cache on disk failed", exc_info=True)

    def _write(self, save: StoredPrefix) -> None:
        folder = self._open(save.path) if save.path else self._folder
        assert folder is not None
        if save.path or not self._made:  # a folder that disappeared may be on a disk that is gone
            folder.path.mkdir(mode=0o700, parents=not save.path, exist_ok=True)
            self._made |= not save.path
        folder.write(save)


def open_disk_cache(
    model: Any, checkpoint: Path, settings: Settings, *, copy: bool, **facts: str
) -> DiskCache | None:
    """Return the disk cache of a loaded model; None if its KV cannot be stored.

    Raises only InvalidRequest, for a setting that cannot work.

    copy, facts: as for `layout.pack` and `model_digest`.
    """
    folder = absolute_folder("prompt_cache_dir", settings.prompt_cache_dir)
    try:
        layout = learn_layout(model)
        if layout is not None:
            identity = model_digest(checkpoint, **facts)
            max_bytes = settings.prompt_cache_disk_mib * MIB
            return DiskCache(layout, identity, folder, max_bytes, copy=copy)
        _log.warning("prompt caches on disk are off: this model's kind of KV cannot be stored")
    except Exception:
        _log.warning("prompt caches on disk are off for this model", exc_info=True)
    return None
