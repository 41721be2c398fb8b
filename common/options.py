"""The `options:` grammar of a host: `key:value` strings, typed by what the value looks like.

Hosts send options as plain strings. A value that looks like a boolean, a whole number or a
decimal number becomes one; everything else stays text. The text as written is kept beside the
typed value, because a setting that holds text (a token named `7`, a revision `1e5`) must not be
changed by a guess about its type.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

OptionValue = bool | int | float | str

_WHOLE = re.compile(r"[+-]?[0-9]{1,300}")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Option:
    """One entry: the value by its looks, and the same value as it was written."""

    value: OptionValue
    text: str


@dataclass(frozen=True, slots=True)
class ParsedOptions:
    """Options by key, and a sentence for every entry that could not be used."""

    options: dict[str, Option] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def typed(text: str) -> OptionValue:
    """The value that a text stands for.

    Python's own number syntax is wider than what people mean: `nan`, `inf`, `1_000` and digits of
    other scripts stay text, and so does a number too large for a float.
    """
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        number = float(text)
        if math.isfinite(number):
            return number
    return text


def parse_options(entries: Iterable[str]) -> ParsedOptions:
    """Split each entry at its first colon; of entries with the same key the last one counts."""
    parsed = ParsedOptions()
    for entry in entries:
        key, colon, text = (part.strip() for part in entry.partition(":"))
        if not colon:
            parsed.warnings.append(f"option {shown(entry)} has no colon: write it as key:value")
        elif not key:
            parsed.warnings.append(f"option {shown(entry)} has no key: write it as key:value")
        else:
            parsed.options[key] = Option(typed(text), text)
    return parsed


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, if one is close."""
    by_folded = {folded(name): name for name in known}
    matches = difflib.get_close_matches(folded(word), by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no known word is close."""
    match = nearest(word, known)
    return f"; did you mean {match!r}?" if match else ""


def folded(word: str) -> str:
    """A word without the differences that typing makes: case and the kind of dash."""
    return word.strip().lower().replace("-", "_")


def shown(value: object, limit: int = 80) -> str:
    """A value quoted for a message, cut where it would flood the log."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
