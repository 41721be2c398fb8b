"""Helps to write error messages: quotes values at limited length, and suggests known words."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable

_LONGEST_WORD = 256


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the most similar known word; None if no word is similar enough."""
    if len(word) > _LONGEST_WORD:  # a client may send a megabyte
        return None
    by_folded = {folded(name): name for name in known}
    matches = difflib.get_close_matches(folded(word), by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or '' if no known word is similar."""
    match = nearest(word, known)
    return f"; did you mean {match!r}?" if match else ""


def folded(word: str) -> str:
    """Return a word in lower case, with its dashes replaced by underscores."""
    return word.strip().lower().replace("-", "_")


def shown(value: object, limit: int = 80) -> str:
    """Return a value quoted for a message, truncated to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def json_fault(error: ValueError | RecursionError) -> str:
    """Return a message for the sender of a text that `json.loads` has refused."""
    if isinstance(error, RecursionError):
        return "its lists and objects are nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return f"it has a whole number of more than {sys.get_int_max_str_digits()} digits"
    return str(error)
