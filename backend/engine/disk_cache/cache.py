"""The prompt cache on disk of one loaded model: what survives a restart of the process.

Three kinds of threads meet here. Prompt threads `find`: they wait for the disk and hold plain
buffers. The engine thread makes KV of those (`restore`) and hands KV over (`save`); it never
waits for the disk, nor for a lock under which somebody does. The disk thread writes and evicts.

Everything here is optional work: whatever goes wrong is a miss and at most one line in the log.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend.engine import kv
from backend.engine.disk_cache import folder as files
from backend.engine.disk_cache import layers
from backend.engine.disk_cache.catalogue import Catalogue
from backend.engine.disk_cache.entry_file import (
    Abandoned,
    Head,
    entry_size,
    is_entry,
    write_entry,
)
from backend.engine.disk_cache.index import (
    Entry,
    candidates,
    covering,
    replaced,
    to_evict,
    usable,
)
from backend.engine.disk_cache.layout import Layout, StoredLayer, refusal
from backend.engine.disk_cache.saves import Save, SaveQueue
from backend.engine.prefix_index import Tokens
from common.options import shown

_log = logging.getLogger(__name__)

LEAST_TOKENS = 64  # fewer are computed about as fast as a file is found, read and checked
_MOST_WAITING = 1 << 30  # bytes of KV that wait to be written, and that wait to be restored


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StoredPrefix:
    """What a file holds, in plain memory. `length` tokens of the prompt are spared by it."""

    tokens: Tokens
    length: int
    layers: tuple[StoredLayer, ...]
    arrays: list[NDArray[Any]]


class DiskCache:
    """Holds no model and no row but those on their way to the disk, so any thread may own it.

    layout: the model's own (`layers.learn_layout`). identity: `identity.model_digest`.
    folder: of all conversations; None: only files that a request names. max_bytes: of all files
    in the folder, and of a file that a request names. copy: see `layers.pack`.
    """

    def __init__(
        self,
        layout: Layout,
        identity: str,
        folder: Path | None,
        max_bytes: int,
        *,
        copy: bool,
        max_waiting: int = _MOST_WAITING,
    ) -> None:
        self._layout = layout
        self._identity = identity
        self._folder = folder
        self._max_bytes = max_bytes
        self._copy = copy
        self._max_waiting = max_waiting
        self._catalogue = Catalogue(folder, identity, layout)
        self._queue = SaveQueue(self._write, max_waiting)
        self._read_lock = threading.Lock()
        self._read_bytes = 0
        self._write_fails = False
        if folder is not None:
            self._queue.put_chore(self._prepare)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of KV that wait to be written; any thread."""
        return self._queue.nbytes

    def has_files(self, path: Path | None) -> bool:
        """Whether there is anything to look into for a request; path: the request's own file."""
        return self._folder is not None or path is not None

    def find(
        self, prompt: Sequence[int], *, path: Path | None = None, held: int = 0
    ) -> StoredPrefix | None:
        """The longest prefix of a prompt that a whole file of this model holds; prompt threads.

        path: the request's own file, looked at beside the folder. held: tokens that are in memory
        already; a file is read only where it spares LEAST_TOKENS more.
        """
        try:
            tokens = np.asarray(prompt, dtype=np.int32)
            entries = list(self._catalogue.refresh())
            if path is not None and (own := self._catalogue.look_at(path)):
                entries.append(own)
            for entry in candidates(entries, tokens, held + LEAST_TOKENS - 1):
                if entry.size > self._max_bytes or not self._reserve(entry.size):
                    continue
                if stored := self._read(entry, tokens):
                    _log.debug("the disk has %d of %d tokens", stored.length, len(tokens))
                    return stored
        except Exception:
            _log.warning("looking for a prompt cache on disk failed", exc_info=True)
        return None

    def restore(self, stored: StoredPrefix, row: kv.RowCache) -> kv.RowCache | None:
        """A new, empty row filled with `stored.length` tokens, or None; the engine thread."""
        try:
            layers.unpack(self._layout, stored.layers, stored.arrays, row)
            if kv.trim(row, len(stored.tokens) - stored.length):
                kv.evaluate(row)
                return row
        except Exception:
            _log.warning("restoring a prompt cache from disk failed", exc_info=True)
        return None

    def save(
        self,
        tokens: Sequence[int],
        row: kv.RowCache,
        *,
        trimmable: bool,
        path: Path | None = None,
    ) -> None:
        """Queue a prefix for the disk; the engine thread.

        row: evaluated, holding exactly `tokens`; others may go on with clones of it. path: the
        request's own file, whose entry it replaces; None: the folder, if there is one.
        """
        if len(tokens) < LEAST_TOKENS or (path is None and self._folder is None):
            return
        try:
            kept = np.asarray(tokens, dtype=np.int32)
            if path is None and (
                entry := covering(self._catalogue.index, kept, trimmable=trimmable)
            ):
                self._queue.put_chore(lambda: files.touch(entry.path))
                return
            packed = layers.pack(row, copy=self._copy)
            if packed is None or (why := refusal(self._layout, packed.layers, len(kept))):
                _log.debug("a prefix is not stored on disk: %s", why if packed else "no way to")
                return
            head = Head(self._identity, trimmable, packed.layers)
            save = Save(kept, head, packed, entry_size(head, kept), path)
            if save.size > self._max_bytes or not self._queue.put(save):
                _log.debug("a prefix of %d bytes is not stored on disk: no room", save.size)
        except Exception:
            _log.warning("storing a prompt cache on disk failed", exc_info=True)

    def drain(self, timeout: float) -> bool:
        """Wait until all saves are written; False after so many seconds. Not the engine thread."""
        return self._queue.drain(timeout)

    def close(self, timeout: float) -> None:
        """Save nothing more; what is not written after so many seconds is given up.

        Blocks for up to that time and a moment: with 0 any thread may call it.
        """
        self._queue.close(timeout)

    def _reserve(self, size: int) -> bool:
        """Make room among what was read and waits to be restored; one may be of any size."""
        with self._read_lock:
            if self._read_bytes and self._read_bytes + size > self._max_waiting:
                return False
            self._read_bytes += size
            return True

    def _release(self, size: int) -> None:
        with self._read_lock:
            self._read_bytes -= size

    def _read(self, entry: Entry, prompt: Tokens) -> StoredPrefix | None:
        """Read a file whose size was reserved; the room is free when the result is gone."""
        stored = None
        try:
            if read := self._catalogue.read(entry):
                head, arrays = read
                length = usable(entry.tokens, prompt, trimmable=entry.trimmable)
                stored = StoredPrefix(entry.tokens, length, head.layers, arrays)
                weakref.finalize(stored, self._release, entry.size)
                files.touch(entry.path)
        finally:
            if stored is None:
                self._release(entry.size)
        return stored

    def _prepare(self) -> None:
        """The disk thread's first task: a folder that is there, and no larger than it may be."""
        assert self._folder is not None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.remove_forgotten(self._folder)
            self._make_room(self._folder, [], 0)
            self._catalogue.refresh()
        except OSError as fault:
            self._write_failed(self._folder, fault)

    def _write(self, save: Save) -> None:
        target = save.path or self._folder
        assert target is not None
        try:
            if save.path is not None:
                self._write_file(save, save.path)
            else:
                self._write_entry(save, target)
            self._write_fails = False
        except Abandoned:
            _log.debug("a prefix is not stored on disk: the process ends")
        except OSError as fault:
            self._write_failed(target, fault)
        except Exception:
            _log.warning("storing a prompt cache on disk failed", exc_info=True)

    def _write_file(self, save: Save, path: Path) -> None:
        """Put a prefix into the file that its request named, unless that file is not ours."""
        if path.is_symlink() or (path.exists() and not is_entry(path)):
            self._catalogue.complain(path, "it is something else, and is left as it is")
            return
        own = self._catalogue.look_at(path)
        if own and covering([own], save.tokens, trimmable=save.trimmable):
            return
        files.remove_forgotten(path.parent)
        self._put(save, path)

    def _write_entry(self, save: Save, folder: Path) -> None:
        index = self._catalogue.refresh()
        if entry := covering(index, save.tokens, trimmable=save.trimmable):
            files.touch(entry.path)
            return
        useless = replaced(index, save.tokens, trimmable=save.trimmable)
        self._make_room(folder, useless, save.size)
        name = files.entry_name(self._identity, save.tokens, trimmable=save.trimmable)
        self._put(save, folder / name)
        for entry in useless:
            files.remove(entry.path)
        self._catalogue.refresh()

    def _put(self, save: Save, path: Path) -> None:
        files.write_whole(
            path,
            lambda file: write_entry(
                file,
                save.head,
                save.tokens,
                layers.buffers(save.packed),
                lambda: self._queue.abandoned,
            ),
        )

    def _make_room(self, folder: Path, useless: Sequence[Entry], needed: int) -> None:
        first = [entry.path for entry in useless]
        for file in to_evict(files.stored_files(folder), first, needed, self._max_bytes):
            files.remove(file.path)

    def _write_failed(self, target: Path, fault: OSError) -> None:
        """One line when writing begins to fail, not one for each request of a full disk."""
        level = logging.DEBUG if self._write_fails else logging.WARNING
        self._write_fails = True
        reason = fault.strerror or type(fault).__name__
        _log.log(level, "prompt cache %s cannot be written: %s", shown(target.name), reason)
