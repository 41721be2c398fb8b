"""The values that a setting accepts, and the parsing of these values from strings."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_WHOLE = re.compile(r"[+-]?[0-9]{1,300}")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that one setting accepts.

    default: the default value; None is written as `auto`, and the backend then decides.
    meaning: the description in the table of docs/options.md.
    minimum, maximum: bounds of numbers.
    choices: the accepted strings; empty means any.
    """

    kind: type
    default: Any
    meaning: str
    minimum: int = 0
    maximum: int = 0
    choices: tuple[str, ...] = ()

    @property
    def expects(self) -> str:
        """The accepted values, for messages and documentation."""
        if self.choices:
            return "one of " + ", ".join(choice or '""' for choice in self.choices)
        words = _KINDS[self.kind]
        if self.kind in (int, float):
            words = f"{words} from {self.minimum} to {self.maximum}"
        return f"{words}, or auto" if self.default is None else words

    def parse(self, text: str) -> Any:
        """Parse a string; for a setting of type str, return it unchanged."""
        return text if self.kind is str else parse_scalar(text)

    def check(self, value: Any) -> Any:
        """Return the value in the setting's type. Raises ValueError with the accepted values."""
        if self.default is None and (value is None or str(value).lower() == "auto"):
            return None
        if self.kind is bool and str(value).lower() in ("on", "off"):
            value = str(value).lower() == "on"
        if self.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        good = type(value) is self.kind or (self.kind is float and type(value) is int)
        if good and self.choices:
            value = value.strip().lower()
            good = value in self.choices
        elif good and self.kind in (int, float):
            good = self.minimum <= value <= self.maximum
        if not good:
            raise ValueError(self.expects)
        return self.kind(value)

    def read(self, text: str) -> Any:
        """Parse and check a string. Raises ValueError with the accepted values."""
        return self.check(self.parse(text))


def parse_scalar(text: str) -> bool | int | float | str:
    """Return the boolean or number that a string contains, or else the string itself.

    Python accepts more numbers than people mean: `nan`, `inf`, `1_000` and digits of other scripts
    stay strings, and so does a number too large for a float.
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return text


def number(default: float | None, bounds: tuple[int, int], meaning: str) -> Any:
    """Return a field for a number; an integer unless its default is a float."""
    kind = float if isinstance(default, float) else int
    return _field(Rule(kind, default, meaning, *bounds))


def flag(default: bool | None, meaning: str) -> Any:
    """Return a field that is true or false."""
    return _field(Rule(bool, default, meaning))


def text(default: str, meaning: str, choices: tuple[str, ...] = ()) -> Any:
    """Return a field for a string, or for one of several words."""
    return _field(Rule(str, default, meaning, choices=choices))


def _field(rule: Rule) -> Any:
    return field(default=rule.default, metadata={"rule": rule})
