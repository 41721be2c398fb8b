"""The prompt cache on disk of one loaded model: KV that survives a restart of the process.

Three kinds of threads use it. Prompt threads call `find`, wait for the disk and get plain buffers.
The engine thread turns these into KV (`restore`) and queues KV for writing (`save`); it never waits
for the disk, nor for a lock that is held during disk access. The writer's thread writes and evicts.

All of this is optional work: any failure is a cache miss and at most one line in the log.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from backend.engine.caching import kv
from backend.engine.disk_cache.catalogue import Catalogue, Entry, Prefix, candidates, touch
from backend.engine.disk_cache.entry_file import Head, entry_size
from backend.engine.disk_cache.identity import model_digest
from backend.engine.disk_cache.layout import (
    Layout,
    StoredLayer,
    learn_layout,
    pack,
    refusal,
    unpack,
)
from backend.engine.disk_cache.use import cache_folder
from backend.engine.disk_cache.writer import Save, Writer
from backend.engine.planning.prefix_index import PrefixKey, Tokens
from backend.engine.settings import Settings
from backend.engine.units import MIB

_log = logging.getLogger(__name__)

# computing fewer tokens takes about as long as finding, reading and checking a file
LEAST_TOKENS = 64
_MOST_WAITING = 1 << 30  # bytes of KV waiting to be written, and of KV waiting to be restored
_SEARCH_SECONDS = 60.0  # how long a request waits for the disk; it computes its prompt then


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StoredPrefix:
    """The contents of a file in plain memory. It can replace the prefill of `length` tokens."""

    tokens: Tokens
    length: int
    layers: tuple[StoredLayer, ...]
    arrays: list[NDArray[Any]]


class DiskCache:
    """The KV of earlier prompts in files.

    It keeps no reference to the model, and to rows only until they are written. layout: the model's
    (`learn_layout`). identity: `model_digest`. folder: shared by all requests; None means that only
    files named by a request are used. max_bytes: maximum size of all files in the folder, and of a
    file named by a request. copy: see `layout.pack`.
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
        self._writer = Writer(self._catalogue, folder, max_bytes, max_waiting)
        # A garbage collection may call `_release` in a thread that has the lock.
        self._read_lock = threading.RLock()
        self._read_bytes = 0
        self._hanging: threading.Thread | None = None  # a search that took too long

    @property
    def writing_bytes(self) -> int:
        """Bytes of KV waiting to be written. For any thread."""
        return self._writer.nbytes

    @property
    def read_bytes(self) -> int:
        """Bytes of KV that was read and waits to be restored. For any thread."""
        return self._read_bytes

    def has_files(self, path: Path | None) -> bool:
        """Whether `find` can return anything. path: as for `find`."""
        return self._folder is not None or path is not None

    def find(
        self,
        prompt: Sequence[int],
        *,
        path: Path | None = None,
        in_memory: int = 0,
        room: float = math.inf,
    ) -> StoredPrefix | None:
        """The longest prefix of a prompt in an intact file of this model. For prompt threads.

        path: the request's own file, used in addition to the folder. in_memory: tokens whose KV is
        already in memory. room: free bytes of memory, of which files that were read already have
        taken some. `candidates` says which files are worth reading. If the disk does not answer,
        the search is abandoned, and until it ends there is no other.
        """
        if self._hanging is not None and self._hanging.is_alive():
            return None
        found: list[StoredPrefix | None] = []

        def run() -> None:
            found.append(self._search(prompt, path, in_memory, room))

        search = threading.Thread(target=run, name="disk-search", daemon=True)
        try:
            search.start()
        except RuntimeError:  # the system allows no more threads
            return None
        search.join(_SEARCH_SECONDS)
        if search.is_alive():
            self._hanging = search
            _log.warning("prompt caches are not read until the disk answers again")
            return None
        return found.pop()

    def _search(
        self, prompt: Sequence[int], path: Path | None, in_memory: int, room: float
    ) -> StoredPrefix | None:
        try:
            key = PrefixKey(prompt)
            entries = list(self._catalogue.refresh())
            if path is not None and (own := self._catalogue.look_at(path)):
                entries.append(own)
            most = min(room, self._max_bytes)
            for entry in candidates(entries, key, in_memory, LEAST_TOKENS, most):
                if not self._reserve(entry.size, room):
                    continue
                if stored := self._read(entry, key):
                    _log.debug("the disk cache has %d of %d tokens", stored.length, len(key))
                    return stored
        except Exception:
            _log.warning("looking for a prompt cache on disk failed", exc_info=True)
        return None

    def restore(self, stored: StoredPrefix, row: kv.RowCache) -> kv.RowCache | None:
        """Fill a new, empty row with `stored.length` tokens; None on failure. Engine thread."""
        try:
            unpack(self._layout, stored.layers, stored.arrays, row)
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
        """Queue a prefix for writing. Engine thread.

        row: evaluated, with the KV of exactly `tokens`; clones of it may be extended meanwhile.
        path: the request's own file, whose entry is replaced; None means the folder, if any.
        """
        if len(tokens) < LEAST_TOKENS or (path is None and self._folder is None):
            return
        try:
            prefix = Prefix(PrefixKey(tokens), trimmable)
            for entry in self._catalogue.entries if path is None else ():
                if entry.prefix.covers(prefix):
                    self._writer.put_chore(partial(touch, entry.path))
                    return
            packed = pack(row, copy=self._copy)
            if packed is None or (why := refusal(self._layout, packed.layers, len(tokens))):
                reason = why if packed else "this kind of KV cannot be stored"
                _log.debug("a prefix is not stored on disk: %s", reason)
                return
            head = Head(self._identity, trimmable, packed.layers)
            save = Save(prefix, head, packed, entry_size(head, prefix.key.tokens), path)
            if save.size > self._max_bytes or not self._writer.put(save):
                _log.debug("a prefix of %d bytes is not stored on disk: no room", save.size)
        except Exception:
            _log.warning("storing a prompt cache on disk failed", exc_info=True)

    def drain(self, timeout: float) -> bool:
        """Wait until all saves are written; False after a timeout. Not for the engine thread."""
        return self._writer.drain(timeout)

    def close(self, timeout: float) -> None:
        """Accept no more saves, and drop those not written within `timeout` seconds.

        Blocks for little longer than `timeout`, so with 0 it may be called on any thread.
        """
        self._writer.close(timeout)

    def _reserve(self, size: int, room: float) -> bool:
        """Reserve bytes for KV that waits to be restored; returns whether there was room.

        A single entry may take all the room."""
        with self._read_lock:
            most = min(room, self._max_waiting) if self._read_bytes else room
            if self._read_bytes + size > most:
                return False
            self._read_bytes += size
            return True

    def _release(self, size: int) -> None:
        with self._read_lock:
            self._read_bytes -= size

    def _read(self, entry: Entry, prompt: PrefixKey) -> StoredPrefix | None:
        """Read a file whose size was reserved. Deleting the result releases the reservation."""
        stored = None
        try:
            if read := self._catalogue.read(entry):
                head, arrays = read
                length = entry.prefix.reusable(prompt)
                stored = StoredPrefix(entry.prefix.key.tokens, length, head.layers, arrays)
                weakref.finalize(stored, self._release, entry.size)
                touch(entry.path)
        finally:
            if stored is None:
                self._release(entry.size)
        return stored


def open_disk_cache(
    model: Any,
    checkpoint: Path,
    settings: Settings,
    *,
    dtype: str,
    kv_kind: str = "",
    adapter: str = "",
    copy: bool,
) -> DiskCache | None:
    """The disk cache of a loaded model; None if its KV cannot be stored. Engine thread.

    dtype, kv_kind and adapter: see `model_digest`. copy: see `layout.pack`. Raises only
    InvalidRequest, for a setting that cannot work.
    """
    folder = cache_folder(settings.prompt_cache_dir)
    try:
        layout = learn_layout(model)
        if layout is not None:
            identity = model_digest(checkpoint, dtype=dtype, kv_kind=kv_kind, adapter=adapter)
            max_bytes = settings.prompt_cache_disk_mib * MIB
            return DiskCache(layout, identity, folder, max_bytes, copy=copy)
        _log.warning("prompt caches on disk are off: this model's kind of KV cannot be stored")
    except Exception:
        _log.warning("prompt caches on disk are off for this model", exc_info=True)
    return None
