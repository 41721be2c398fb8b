"""The most recently used results, limited in size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The most recently used results, by key; thread-safe.

    most: maximum size of all results together; a larger result is not stored.
    entries: maximum number of results.
    size: size of all results together.
    """

    def __init__(self, most: int, entries: int | None = None) -> None:
        self.size = 0
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._most, self._entries = most, entries
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Store a result, unless a result with this key is stored."""
        with self._lock:
            if key in self._kept or size > self._most:
                return
            self._kept[key] = value, size
            self.size += size
            while self._entries is not None and len(self._kept) > self._entries:
                self._drop_oldest()
        self.shrink(self._most)

    def has(self, value: Value) -> bool:
        with self._lock:
            return any(kept is value for kept, _ in self._kept.values())

    def shrink(self, most: int) -> None:
        """Drop the least recently used results until their size is at most `most`."""
        with self._lock:
            while self.size > most:
                self._drop_oldest()

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self.size = 0

    def _drop_oldest(self) -> None:
        _, (_, size) = self._kept.popitem(last=False)
        self.size -= size
