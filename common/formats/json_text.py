"""Writes text as JSON strings, and recognises JSON's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from json.encoder import encode_basestring

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"([+-]?)(?=\.?[0-9])0*([0-9]*)(?:\.([0-9]*))?([eE][+-]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")

Send = Callable[[str], None]
"""Receives a text in pieces, as they come."""


def escaped(text: str) -> str:
    """Return the content of a JSON string, without lone surrogates, which some encoders reject.

    Escaping a text in pieces gives the same result as escaping it at once.
    """
    written = encode_basestring(text)[1:-1]
    if written.isascii():
        return written
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", written)


def json_string(text: str) -> str:
    """Return a text as a JSON string."""
    return f'"{escaped(text)}"'


def number_of(text: str) -> str | None:
    """Return the text as a JSON number with the same digits; None if it is not a number."""
    if NUMBER.fullmatch(text) or not (match := _LOOSE_NUMBER.fullmatch(text)):
        return text if NUMBER.fullmatch(text) else None
    sign, whole, fraction, exponent = match.groups(default="")
    return f"{sign.strip('+')}{whole or '0'}{fraction and '.'}{fraction}{exponent}"
