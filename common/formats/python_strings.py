"""What the escapes of a Python string literal stand for, without evaluating anything."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|\n|.)", re.S)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}


def decoded_escapes(text: str) -> str:
    """The text of a literal's inside; an escape that Python does not know stays as it is."""
    return _ESCAPE.sub(_decoded, text)


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
