"""Fields that are refused because ignoring them would change what the user gets.

The host fills every request from its configuration (contract 2.7), so each field has values that
mean "off"; those pass. Anything else is refused by name until the backend honours it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backend.engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Neutral:
    """The values of a field that ask for nothing. `words` names them for a reader."""

    holds: Callable[[Any], bool]
    words: str


@dataclass(frozen=True, slots=True)
class Refused:
    """When a field is as good as absent, why it is not honoured, and what to send instead."""

    neutral: Neutral
    why: str
    instead: str


def one_of(*values: object) -> Neutral:
    return Neutral(lambda value: value in values, " or ".join(map(str, values)))


empty = Neutral(lambda value: not value, "empty")


def word_of(*words: str) -> Neutral:
    """One of the words, in any case, or nothing."""
    return Neutral(
        lambda value: value.strip().lower() in ("", *words),
        " or ".join(("empty", *(f"`{word}`" for word in words))),
    )


def require_neutral(message: Any, table: Mapping[str, Refused]) -> None:
    """Raise InvalidRequest for the first field of the table that asks for something."""
    for name, refused in table.items():
        value = getattr(message, name)
        if not refused.neutral.holds(value):
            given = f" is {value:g}" if isinstance(value, (int, float)) and value else " is set"
            given = " is true" if value is True else given
            raise InvalidRequest(f"{name}{given}, but {refused.why}: {refused.instead}")
