"""Positions of values in a JSON text, for error messages."""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}:,]|[^][{}:,"\s]+', re.DOTALL)

Pointer = tuple[str | int, ...]


def line_and_column(text: str, at: int) -> str:
    """An offset as line and column, both counted from 1."""
    start = text.rfind("\n", 0, at) + 1
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - start + 1}"


def too_deep(text: str, depth: int) -> int | None:
    """The first offset where brackets are nested deeper than `depth`; None if nowhere."""
    level = 0
    for token in _TOKEN.finditer(text):
        if token[0] in ("{", "["):
            level += 1
            if level > depth:
                return token.start()
        elif token[0] in ("}", "]"):
            level -= 1
    return None


def place_of(text: str, pointer: Pointer) -> int:
    """The offset of the member or item that a pointer refers to; 0 if there is none.

    The text must be valid JSON.
    """
    path: list[str | int] = []
    key: str | None = None
    for token in _TOKEN.finditer(text):
        symbol = token[0]
        if symbol in ("{", "["):
            path.append("" if symbol == "{" else 0)
        elif symbol in ("}", "]"):
            path.pop()
        elif symbol == ",":
            last = path[-1]
            if isinstance(last, int):
                path[-1] = last + 1
            key = None
        elif symbol == ":":
            continue
        elif path and isinstance(path[-1], str) and key is None:
            key = path[-1] = json.loads(symbol)
            if tuple(path) == pointer:
                return token.start()
            continue
        if symbol in ("{", "["):
            key = None
            if tuple(path[:-1]) == pointer:
                return token.start()
        elif path and isinstance(path[-1], int) and tuple(path) == pointer:
            return token.start()
    return 0
