"""A queue of prefixes for the disk, and the thread that writes them while there are any.

The engine thread only appends to the queue. It is limited in bytes, because queued KV stays in
memory. A save that does not fit is dropped, which is a cache miss later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from safetensors import SafetensorError

from backend.engine.disk_cache.entry_file import StoredPrefix
from backend.engine.disk_cache.prefix_folder import reason

_log = logging.getLogger(__name__)


class Writer:
    """write: called in the thread with each save. most: maximum bytes of queued KV.

    The thread keeps the writer alive, so a writer without an owner still finishes its work.
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
        """Queue a save in place of those that it replaces; False if there is no room for it."""
        with self._changed:
            begun, queued = self._saves[:1], self._saves[1:]
            staying = begun + [
                other
                for other in queued
                if other.path != save.path or not save.prefix.replaces(other.prefix)
            ]
            waiting = sum(other.nbytes for other in staying)
            if self._closing or (waiting and waiting + save.nbytes > self._most):
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._main, name="disk", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system allows no more threads
                    return False
                self._thread = thread
            self._saves = [*staying, save]
            return True

    def drain(self, timeout: float) -> bool:
        """Wait until the queue is empty; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def close(self, timeout: float) -> None:
        """Accept no more saves, and drop those not begun within `timeout` seconds."""
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
        """Return the next save; None if there is none, and the thread must then end."""
        with self._changed:
            if self._saves:
                return self._saves[0]
            self._thread = None
            self._changed.notify_all()
            return None
