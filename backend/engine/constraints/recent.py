"""An LRU cache of results by text, limited in size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

MAX_ENTRIES = 64
MAX_TEXT = 4 * 1024 * 1024
"""Maximum number of characters of all texts together."""

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The most recently used results, by text; thread-safe."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str) -> Value | None:
        with self._lock:
            if text in self._entries:
                self._entries.move_to_end(text)
            return self._entries.get(text)

    def put(self, text: str, value: Value) -> None:
        with self._lock:
            self._entries[text] = value
            while len(self._entries) > 1 and (
                len(self._entries) > MAX_ENTRIES or sum(map(len, self._entries)) > MAX_TEXT
            ):
                self._entries.popitem(last=False)
