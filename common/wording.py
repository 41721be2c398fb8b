"""What sentences for users share: a value quoted within bounds, and the word that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
