"""Wraps a message and records which of its fields are read."""

from __future__ import annotations

from typing import Any


class Recorder:
    """Forwards to the message; `read` holds the names that were read."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._message, name)
