"""Which files hold what: looks at files, and remembers the good and the bad."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from backend.engine.disk_cache import folder as files
from backend.engine.disk_cache.entry_file import (
    BadEntry,
    Head,
    Opened,
    open_entry,
    read_arrays,
    read_head,
)
from backend.engine.disk_cache.index import Entry, Index
from backend.engine.disk_cache.layout import Layout, refusal
from common.options import shown

_log = logging.getLogger(__name__)

_MOST_REMEMBERED = 1000

State = tuple[int, int, int]  # of a file: inode, size, time of change in ns


class Catalogue:
    """The entries of one model in a folder, and in files that requests name.

    Other processes write and evict too, so every look begins with the names that are there now.
    `index` may be read by any thread at any time; the methods wait for the disk.
    """

    def __init__(self, folder: Path | None, identity: str, layout: Layout) -> None:
        self._folder = folder
        self._identity = identity
        self._layout = layout
        self._looking = threading.Lock()
        self._bad: dict[Path, State | None] = {}
        self.index: Index = ()

    def refresh(self) -> Index:
        """The entries that are in the folder now."""
        if self._folder is None:
            return ()
        with self._looking:
            try:
                names = files.names_of(self._folder, self._identity)
            except OSError as fault:
                self._complain(self._folder, _reason(fault))
                names = frozenset()
            known = {entry.path.name: entry for entry in self.index}
            if names != known.keys():
                looked = (
                    known.get(name) or self._look_at(self._folder / name) for name in sorted(names)
                )
                self.index = tuple(entry for entry in looked if entry is not None)
            return self.index

    def look_at(self, path: Path) -> Entry | None:
        """What a file holds, if it is whole as far as its head tells and of this model."""
        with self._looking:
            return self._look_at(path)

    def read(self, entry: Entry) -> tuple[Head, list[NDArray[Any]]] | None:
        """Everything of an entry, or None; then it is not looked at again until it changes."""
        try:
            with open_entry(entry.path) as file:
                opened = read_head(file)
                self._check(opened)
                if opened.tokens.tobytes() != entry.tokens.tobytes():
                    return None  # a request's own file, replaced since
                return opened.head, read_arrays(file, opened)
        except FileNotFoundError:
            self._forget(entry)
        except (OSError, BadEntry) as fault:
            self._forget(entry)
            self.complain(entry.path, _reason(fault))
        return None

    def complain(self, path: Path, reason: str) -> None:
        """Say once for each state of a file why it is not used."""
        with self._looking:
            self._complain(path, reason)

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
            self._complain(path, _reason(fault))
            return None
        return Entry(path, opened.tokens, opened.head.trimmable, opened.size)

    def _check(self, opened: Opened) -> None:
        if opened.head.identity != self._identity:
            raise BadEntry("it was made with another model, adapter, dtype or KV cache type")
        if why := refusal(self._layout, opened.head.layers, len(opened.tokens)):
            raise BadEntry(why)

    def _forget(self, entry: Entry) -> None:
        with self._looking:
            self.index = tuple(other for other in self.index if other is not entry)

    def _complain(self, path: Path, reason: str) -> None:
        state = _state(path)
        if path in self._bad and self._bad[path] == state:
            return
        if len(self._bad) >= _MOST_REMEMBERED:
            self._bad.clear()
        self._bad[path] = state
        _log.warning("prompt cache %s is not used: %s", shown(path.name), reason)


def _state(path: Path) -> State | None:
    """None: it is not there, or cannot be seen."""
    try:
        facts = os.stat(path, follow_symlinks=False)  # noqa: PTH116, Path.stat does no less
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _reason(fault: OSError | BadEntry) -> str:
    """A clause without a path."""
    if isinstance(fault, OSError):
        return (fault.strerror or type(fault).__name__).lower()
    return str(fault)
