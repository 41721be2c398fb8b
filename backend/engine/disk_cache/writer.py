"""Queues prefixes for the disk, and writes them in a thread that runs while the queue has any.

The engine thread only appends to the queue. The queue is limited in bytes, because queued KV stays
in memory. A prefix that does not fit is dropped, which is a cache miss later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from safetensors import SafetensorError

from backend.engine.disk_cache.prefix_file import StoredPrefix
from backend.engine.disk_cache.prefix_folder import reason

_log = logging.getLogger(__name__)


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
        """Wait until the queue is empty, and return False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def close(self, timeout: float) -> None:
        """Accept no more prefixes, and drop waiting prefixes after `timeout` seconds."""
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
