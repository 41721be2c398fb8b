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
class Refused:
    """When a field is as good as absent, why it is not honoured, and what to send instead."""

    neutral: Callable[[Any], bool]
    why: str
    instead: str


def one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


def empty(value: Any) -> bool:
    """Unset: 0, false, "" or no items."""
    return not value


def word_of(*words: str) -> Callable[[Any], bool]:
    """One of the words, in any case, or nothing."""
    return lambda value: value.strip().lower() in ("", *words)


def require_neutral(message: Any, table: Mapping[str, Refused]) -> None:
    """Raise InvalidRequest for the first field of the table that asks for something."""
    for name, refused in table.items():
        value = getattr(message, name)
        if not refused.neutral(value):
            given = f" is {value:g}" if isinstance(value, (int, float)) and value else " is set"
            given = " is true" if value is True else given
            raise InvalidRequest(f"{name}{given}, but {refused.why}: {refused.instead}")
