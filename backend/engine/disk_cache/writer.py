"""Writes prefixes to disk, and keeps the folder within its size limit.

The engine thread only appends to a queue; the writer's own thread waits for the disk. The queue is
limited in bytes, because queued KV stays in memory. A save that does not fit is dropped, which is a
cache miss later.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backend.engine.disk_cache.catalogue import Catalogue, Prefix, make_room, remove, touch
from backend.engine.disk_cache.entry_file import (
    Abandoned,
    Head,
    is_entry,
    remove_forgotten,
    write_entry,
)
from backend.engine.disk_cache.layout import PackedRow, buffers
from common.wording import shown

_log = logging.getLogger(__name__)

_MOST_CHORES = 1024
_GRACE = 0.2  # seconds that a running write needs at most to notice that it should stop


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """A queued prefix. size: of its file. path: the request's own file; None means the folder."""

    prefix: Prefix
    head: Head
    packed: PackedRow
    size: int
    path: Path | None


class Writer:
    """A queue of saves and other small tasks, and the thread that runs them while there are any.

    The thread keeps the writer alive while there is work, so a writer without an owner still
    finishes it. folder: of the entries; None means that only files named by requests are written.
    max_bytes: maximum size of all files in the folder. max_waiting: maximum bytes of queued KV.
    """

    def __init__(
        self, catalogue: Catalogue, folder: Path | None, max_bytes: int, max_waiting: int
    ) -> None:
        self._catalogue = catalogue
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._saves: deque[Save] = deque()
        self._chores: deque[Callable[[], None]] = deque()
        self._at_work = 0
        self._closing = False
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False
        if folder is not None:
            self.put_chore(partial(self._prepare, folder))

    @property
    def nbytes(self) -> int:
        """Bytes of KV that are queued or being written."""
        with self._changed:
            return self._at_work + sum(save.size for save in self._saves)

    def put(self, save: Save) -> bool:
        """Queue a save, replacing those that it makes useless.

        False if there is no room for it, or no thread.
        """
        with self._changed:
            if self._closing:
                return False
            rivals = [other for other in self._saves if other.path == save.path]
            if save.path is None:
                if any(other.prefix.covers(save.prefix) for other in rivals):
                    return True
                rivals = [other for other in rivals if save.prefix.replaces(other.prefix)]
            staying = [other for other in self._saves if other not in rivals]
            waiting = self._at_work + sum(other.size for other in staying)
            if waiting and waiting + save.size > self._max_waiting:
                return False
            self._saves = deque([*staying, save])
            return self._wake()

    def put_chore(self, chore: Callable[[], None]) -> None:
        """Queue a small task, which runs before all saves; it is dropped if too many are queued.

        It may wait for the disk and must not raise.
        """
        with self._changed:
            if not self._closing and len(self._chores) < _MOST_CHORES:
                self._chores.append(chore)
                self._wake()

    def drain(self, timeout: float) -> bool:
        """Wait until the queue is empty; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def close(self, timeout: float) -> None:
        """Accept no more work, and drop what is not written within `timeout` seconds."""
        with self._changed:
            self._closing = True
        if self.drain(timeout):
            return
        self._abandoned.set()
        with self._changed:
            self._saves.clear()
            self._chores.clear()
        self.drain(_GRACE)

    def _wake(self) -> bool:
        """Start the thread if none runs. If that fails, drops the saves and returns False."""
        if self._thread is not None:
            return True
        thread = threading.Thread(target=self._main, name="disk", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads
            self._saves.clear()
            return False
        self._thread = thread
        return True

    def _main(self) -> None:
        while task := self._next():
            task()

    def _next(self) -> Callable[[], None] | None:
        """The next task; None if there is none, and the thread must then end."""
        with self._changed:
            self._at_work = 0
            if self._chores:
                return self._chores.popleft()
            if self._saves:
                save = self._saves.popleft()
                self._at_work = save.size
                return partial(self._write, save)
            self._thread = None
            self._changed.notify_all()
            return None

    def _prepare(self, folder: Path) -> None:
        """The first task: create the folder, and evict until it is within its limit."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_room(folder, (), self._max_bytes)
            self._catalogue.refresh()
        except OSError as fault:
            self._failed(folder, fault)

    def _write(self, save: Save) -> None:
        target = save.path or self._folder
        assert target is not None
        try:
            if save.path is not None:
                self._write_file(save, save.path)
            else:
                self._write_entry(save, target)
            self._failing = False
        except Abandoned as why:
            _log.debug("a prefix is not stored on disk: %s", why)
        except OSError as fault:
            self._failed(target, fault)
        except Exception:
            _log.warning("storing a prompt cache on disk failed", exc_info=True)

    def _write_file(self, save: Save, path: Path) -> None:
        """Put a prefix into the file that its request named, unless that file is not ours."""
        if path.is_symlink() or (path.exists() and not is_entry(path)):
            self._catalogue.log_unusable(path, "it is not a prompt cache, and is left unchanged")
            return
        before = self._catalogue.look_at(path)
        if before is None or not before.prefix.covers(save.prefix):
            remove_forgotten(path.parent)
            self._put(save, path)

    def _write_entry(self, save: Save, folder: Path) -> None:
        entries = self._catalogue.refresh()
        for entry in entries:
            if entry.prefix.covers(save.prefix):
                touch(entry.path)
                return
        useless = [entry.path for entry in entries if save.prefix.replaces(entry.prefix)]
        has_room = partial(make_room, folder, useless, self._max_bytes)
        self._put(save, folder / self._catalogue.name_of(save.prefix), has_room)
        for path in useless:
            remove(path)
        self._catalogue.refresh()

    def _put(self, save: Save, path: Path, has_room: Callable[[], bool] = lambda: True) -> None:
        tokens, give_up = save.prefix.key.tokens, self._abandoned.is_set
        write_entry(path, save.head, tokens, buffers(save.packed), give_up, has_room)

    def _failed(self, target: Path, fault: OSError) -> None:
        """Log a failed write; only the first of several in a row is a warning."""
        level = logging.DEBUG if self._failing else logging.WARNING
        self._failing = True
        reason = fault.strerror or type(fault).__name__
        _log.log(level, "prompt cache %s cannot be written: %s", shown(target.name), reason)
