"""An LRU cache of results by text, limited in size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

MAX_ENTRIES = 64

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The most recently used results, by text; thread-safe.

    most: maximum of the sizes of all results together. A larger one is not kept at all.
    """

    def __init__(self, most: int) -> None:
        self._entries: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self._most = most
        self._lock = threading.Lock()

    def get(self, text: str) -> Value | None:
        with self._lock:
            if text not in self._entries:
                return None
            self._entries.move_to_end(text)
            return self._entries[text][0]

    def put(self, text: str, value: Value, size: int) -> None:
        if size > self._most:
            return
        with self._lock:
            self._entries[text] = value, size
            while len(self._entries) > MAX_ENTRIES or self._size() > self._most:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def _size(self) -> int:
        return sum(size for _, size in self._entries.values())
