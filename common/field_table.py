"""Describes which fields of a request or a file are used, have no effect, or are refused.

The code that refuses or ignores fields reads these tables, and so does the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Off:
    """The values of a field that request nothing.

    words: describes these values in documentation.
    """

    holds: Callable[[Any], bool]
    words: str


EMPTY = Off(lambda value: not value, "empty")


def one_of(*values: object) -> Off:
    """Return an `Off` of exactly these values."""
    return Off(lambda value: value in values, " or ".join(map(str, values)))


def empty_or(*values: object) -> Off:
    """Return an `Off` of these values and of all values that count as false, such as null."""
    return Off(lambda value: not value or value in values, f"empty or {values}")


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused unless its value is one of `off`.

    instead: what the user can do instead.
    why: the reason, if it is not obvious.
    """

    instead: str
    off: Off = EMPTY
    why: str = ""


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The treatment of the fields of a request or a file.

    Each field is in one of the mappings. Fields that a schema describes need no row.

    used: the effect of each field.
    neutral: fields that are accepted without effect, and the reason for each.
    """

    refused: Mapping[str, Refused] = field(default_factory=dict)
    neutral: Mapping[str, str] = field(default_factory=dict)
    used: Mapping[str, str] = field(default_factory=dict)

    def first_refused(self, values: Mapping[str, Any]) -> str:
        """Return the first refused field whose value requests something; "" if there is none."""
        for name, row in self.refused.items():
            if name in values and not row.off.holds(values[name]):
                return name
        return ""

    def without(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values without neutral and refused fields."""
        unused = self.neutral.keys() | self.refused.keys()
        return {name: value for name, value in values.items() if name not in unused}


def each(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reason for each name.

    reasons: the reason for each key, in which names are separated by spaces.
    """
    return {name: why for why, names in reasons.items() for name in names.split()}
