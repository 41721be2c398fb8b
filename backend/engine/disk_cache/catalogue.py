"""Lists the stored prefixes, finds those that match a prompt, and decides which to evict.

Several processes, for several models, may share a folder, so files may appear and disappear at any
time. Only files with our name pattern and magic bytes are counted, read or removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend.engine.disk_cache.entry_file import (
    FORGOTTEN,
    BadEntry,
    Head,
    Opened,
    is_entry,
    open_entry,
    read_arrays,
    read_head,
    remove_forgotten,
)
from backend.engine.disk_cache.layout import Layout, refusal
from backend.engine.planning.prefix_index import PrefixKey
from common.wording import shown

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.mlxkv")
_MOST_REMEMBERED = 1000
# minimum share of a file's tokens that the prompt can use: all of them are read and copied
_LEAST_SHARE = 1 / 16

FileState = tuple[int, int, int]  # inode, size, time of change in ns


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A token sequence that is stored or queued. trimmable: its KV can be cut to any prefix."""

    key: PrefixKey
    trimmable: bool

    def reusable(self, prompt: PrefixKey) -> int:
        """How many tokens of a prompt would need no prefill; the last one always needs it."""
        shared = min(self.key.shared(prompt), len(prompt) - 1)
        return shared if self.trimmable or shared == len(self.key) else 0

    def covers(self, other: Prefix) -> bool:
        """Whether this entry can replace the other for every prompt."""
        return self.key.shared(other.key) == len(other.key) and (
            self.trimmable or (not other.trimmable and len(self.key) == len(other.key))
        )

    def replaces(self, other: Prefix) -> bool:
        """Whether the other entry is a prefix of this one that is no longer needed."""
        return self.trimmable and self.key.shared(other.key) == len(other.key)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A prefix in a file of this model. size: bytes of the file."""

    path: Path
    prefix: Prefix
    size: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the folder, of any model. used: time of the last write or read, in ns."""

    path: Path
    size: int
    used: int


class Catalogue:
    """The entries of one model in a folder, and in files that requests name.

    Other processes write and evict too, so `refresh` lists the folder again. `entries` is replaced
    as a whole, so the engine thread can read it without a lock. The methods wait for the disk.
    """

    def __init__(self, folder: Path | None, identity: str, layout: Layout) -> None:
        self._folder = folder
        self._identity = identity
        self._layout = layout
        self._looking = threading.Lock()
        self._bad: dict[Path, FileState | None] = {}
        self.entries: tuple[Entry, ...] = ()

    def refresh(self) -> tuple[Entry, ...]:
        """List the folder; returns its entries."""
        if self._folder is None:
            return ()
        with self._looking:
            try:
                names = self._names(self._folder)
            except OSError as fault:
                self._log_unusable(self._folder, _reason(fault))
                names = set()
            known = {entry.path.name: entry for entry in self.entries}
            if names != known.keys():
                looked = (
                    known.get(name) or self._look_at(self._folder / name) for name in sorted(names)
                )
                self.entries = tuple(entry for entry in looked if entry is not None)
            return self.entries

    def look_at(self, path: Path) -> Entry | None:
        """The entry in a file.

        None if it belongs to another model or its head is damaged. Waits for the disk.
        """
        with self._looking:
            return self._look_at(path)

    def read(self, entry: Entry) -> tuple[Head, list[NDArray[Any]]] | None:
        """Read an entry; None if it is damaged, and it is then ignored until the file changes."""
        try:
            with open_entry(entry.path) as file:
                opened = read_head(file)
                self._check(opened)
                if not np.array_equal(opened.tokens, entry.prefix.key.tokens):
                    return None  # a request's own file that has been replaced
                return opened.head, read_arrays(file, opened)
        except FileNotFoundError:
            self._forget(entry)
        except (OSError, BadEntry) as fault:
            self._forget(entry)
            self.log_unusable(entry.path, _reason(fault))
        return None

    def log_unusable(self, path: Path, reason: str) -> None:
        """Log why a file is not used, once per version of the file."""
        with self._looking:
            self._log_unusable(path, reason)

    def name_of(self, prefix: Prefix) -> str:
        """The file name for a prefix. Equal names have equal content, whichever process writes."""
        key = b"\1" if prefix.trimmable else b"\0"
        digest = hashlib.blake2b(prefix.key.tokens.tobytes(), digest_size=16, key=key)
        return f"{self._identity}-{digest.hexdigest()}.mlxkv"

    def _names(self, folder: Path) -> set[str]:
        return {
            name
            for name in os.listdir(folder)  # noqa: PTH208, names only: no Path for each of them
            if name.startswith(self._identity) and _NAME.fullmatch(name)
        }

    def _look_at(self, path: Path) -> Entry | None:
        if path in self._bad and self._bad[path] == _state(path):
            return None
        try:
            with open_entry(path) as file:
                opened = read_head(file)
            self._check(opened)
        except FileNotFoundError:
            return None
        except (OSError, BadEntry) as fault:
            self._log_unusable(path, _reason(fault))
            return None
        return Entry(path, Prefix(PrefixKey(opened.tokens), opened.head.trimmable), opened.size)

    def _check(self, opened: Opened) -> None:
        if opened.head.identity != self._identity:
            raise BadEntry("it was made with another model, adapter, dtype or KV cache type")
        if why := refusal(self._layout, opened.head.layers, len(opened.tokens)):
            raise BadEntry(why)

    def _forget(self, entry: Entry) -> None:
        with self._looking:
            self.entries = tuple(other for other in self.entries if other is not entry)

    def _log_unusable(self, path: Path, reason: str) -> None:
        state = _state(path)
        if path in self._bad and self._bad[path] == state:
            return
        if len(self._bad) >= _MOST_REMEMBERED:
            self._bad.clear()
        self._bad[path] = state
        _log.warning("prompt cache %s is not used: %s", shown(path.name), reason)


def candidates(
    entries: Iterable[Entry], prompt: PrefixKey, in_memory: int, least: int, most_bytes: float
) -> list[Entry]:
    """The entries worth reading: first those that save the prefill of most tokens, then by size.

    Each saves at least `least` tokens beyond the `in_memory` ones, and so many of its own that
    reading takes less time than computing. most_bytes: maximum size of a file.
    """

    def pays(entry: Entry, length: int) -> bool:
        return length - in_memory >= max(least, _LEAST_SHARE * len(entry.prefix.key))

    fitting = [entry for entry in entries if entry.size <= most_bytes]
    spared = [(entry.prefix.reusable(prompt), entry) for entry in fitting]
    serving = [(length, entry) for length, entry in spared if pays(entry, length)]
    return [entry for _, entry in sorted(serving, key=lambda pair: (-pair[0], pair[1].size))]


def touch(path: Path) -> None:
    """Mark a file as used now; the least recently used file is evicted first."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove(path: Path) -> None:
    """Remove a file if it is one of ours. Raises OSError, but not if it is already gone."""
    if is_entry(path):
        path.unlink(missing_ok=True)


def make_room(folder: Path, useless: Collection[Path], bound: int) -> bool:
    """Remove entries of any model until the unfinished files of all processes fit.

    False if they cannot. Raises OSError.
    """
    unfinished = remove_forgotten(folder)
    if unfinished > bound:
        return False
    for file in to_evict(_stored_files(folder), useless, unfinished, bound):
        remove(file.path)
    return True


def to_evict(
    files: Sequence[StoredFile], useless: Collection[Path], needed: int, bound: int
) -> list[StoredFile]:
    """The files to remove before `needed` bytes are written, so that `bound` is never exceeded.

    Files in `useless` come first, then the least recently used.
    """
    order = sorted(files, key=lambda file: (file.path not in useless, file.used))
    excess = sum(file.size for file in files) + needed - bound
    chosen: list[StoredFile] = []
    for file in order:
        if excess <= 0:
            break
        chosen.append(file)
        excess -= file.size
    return chosen


def _stored_files(folder: Path) -> list[StoredFile]:
    """All entries in the folder, of every model.

    Files with a time in the future (the clock has been set back) count as used long ago: otherwise
    each new entry would be evicted to make room for the next.
    """
    files = []
    latest = time.time_ns() + int(FORGOTTEN * 1e9)
    with os.scandir(folder) as found:
        for file in found:
            if not _NAME.fullmatch(file.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                facts = file.stat(follow_symlinks=False)
                if is_entry(Path(file.path)):
                    used = facts.st_mtime_ns if facts.st_mtime_ns < latest else 0
                    files.append(StoredFile(Path(file.path), facts.st_size, used))
    return files


def _state(path: Path) -> FileState | None:
    """The state of a file; None if it does not exist or cannot be accessed."""
    try:
        facts = os.stat(path, follow_symlinks=False)  # noqa: PTH116, Path.stat does no less
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _reason(fault: OSError | BadEntry) -> str:
    """The reason as a clause without a path."""
    if isinstance(fault, OSError):
        return (fault.strerror or type(fault).__name__).lower()
    return str(fault)
