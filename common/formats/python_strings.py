"""Decodes the escapes in a Python string literal, without evaluating anything."""

from __future__ import annotations

import re

from common.formats.cursor import Cursor, Wait

_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|\n|.)", re.S)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}


_LENGTHS = {"x": 4, "u": 6, "U": 10, **dict.fromkeys("01234567", 4)}


def read_escape(cursor: Cursor) -> Wait[str]:
    """Decode the next escape; one that Python does not know is left unchanged."""
    pair = yield from cursor.peek(2)
    length = _LENGTHS.get(pair[1:], 2)
    whole = yield from cursor.peek(length)
    match = _ESCAPE.match(whole)
    cut = len(whole) < length and (whole[2:].isalnum() or len(whole) == 2)
    if match is None or cut:
        cursor.rest()
        raise cursor.unreadable()
    cursor.take(match.end())
    return _decoded(match)


def _decoded(match: re.Match[str]) -> str:
    code = match.group(1)
    if code in _SIMPLE:
        return _SIMPLE[code]
    if code in ("\\", "'", '"'):
        return code
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else match.group()
    if code[0] in "01234567":
        return chr(int(code, 8))
    return match.group()
