"""What waits to be written, and the thread that writes it.

The engine thread only ever appends here. The queue is bounded in bytes, because what waits keeps
its buffers in memory; what does not fit is dropped, which is a miss later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backend.engine.disk_cache.entry_file import Head
from backend.engine.disk_cache.index import covering, replaced
from backend.engine.disk_cache.layers import PackedRow
from backend.engine.prefix_index import Tokens

_MOST_CHORES = 1024
_LAST_WORD = 0.2  # seconds for a write to see that it is to be given up


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """A prefix on its way to the disk. path: a file of its own; None: the folder."""

    tokens: Tokens
    head: Head
    packed: PackedRow
    size: int
    path: Path | None

    @property
    def trimmable(self) -> bool:
        return self.head.trimmable


class SaveQueue:
    """Saves and chores for one thread, which lives for as long as there is something to do.

    So a queue that nobody holds any more finishes its work and is gone, without being told.

    write: writes one save; it and the chores may block on the disk and must not raise.
    """

    def __init__(self, write: Callable[[Save], None], max_bytes: int) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._saves: deque[Save] = deque()
        self._chores: deque[Callable[[], None]] = deque()
        self._at_work = 0
        self._closing = False
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def abandoned(self) -> bool:
        """Whether the write under way should be given up."""
        return self._abandoned.is_set()

    @property
    def nbytes(self) -> int:
        """Bytes of KV that wait or are being written."""
        with self._changed:
            return self._at_work + sum(save.size for save in self._saves)

    def put(self, save: Save) -> bool:
        """Queue a save in place of those that it makes useless. False: there is no room."""
        with self._changed:
            if self._closing:
                return False
            rivals = [other for other in self._saves if other.path == save.path]
            if save.path is None:
                if covering(rivals, save.tokens, trimmable=save.trimmable):
                    return True
                rivals = replaced(rivals, save.tokens, trimmable=save.trimmable)
            staying = [other for other in self._saves if other not in rivals]
            waiting = self._at_work + sum(other.size for other in staying)
            if waiting and waiting + save.size > self._max_bytes:
                return False
            self._saves = deque([*staying, save])
            self._wake()
            return True

    def put_chore(self, chore: Callable[[], None]) -> None:
        """Queue a small task, which goes before all saves. It is dropped where too many wait."""
        with self._changed:
            if not self._closing and len(self._chores) < _MOST_CHORES:
                self._chores.append(chore)
                self._wake()

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is left to do; False after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def close(self, timeout: float) -> None:
        """Take nothing more, and give up what is not written after so many seconds."""
        with self._changed:
            self._closing = True
        if self.drain(timeout):
            return
        self._abandoned.set()
        with self._changed:
            self._saves.clear()
            self._chores.clear()
        self.drain(_LAST_WORD)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="disk", daemon=True)
            self._thread.start()

    def _main(self) -> None:
        while task := self._next():
            task()

    def _next(self) -> Callable[[], None] | None:
        """What to do next. None: nothing, and the thread is gone."""
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
