"""What a setting of a model accepts, and how the table of settings spells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backend.engine.errors import InvalidRequest
from common.options import shown

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class Rule:
    """What a setting accepts. `auto`: the word stands for None, the device's own choice."""

    kind: type
    meaning: str
    minimum: float = 0
    maximum: float = 0
    auto: bool = False
    choices: tuple[str, ...] = ()

    @property
    def expects(self) -> str:
        if self.choices:
            return "one of " + ", ".join(choice or '""' for choice in self.choices)
        words = _NAMES[self.kind]
        if self.kind in (int, float):
            words = f"{words} from {self.minimum} to {self.maximum}"
        return f"{words}, or auto" if self.auto else words


def number(default: int | None, minimum: int, maximum: int, meaning: str) -> Any:
    """A setting that is a whole number; without a default, the device chooses."""
    rule = Rule(int, meaning, minimum, maximum, auto=default is None)
    return field(default=default, metadata={"rule": rule})


def share(default: float, meaning: str) -> Any:
    """A setting from 0 to 1."""
    return field(default=default, metadata={"rule": Rule(float, meaning, 0, 1)})


def flag(default: bool | None, meaning: str) -> Any:
    """A setting that is true or false; without a default, the model or the device says."""
    rule = Rule(bool, meaning, auto=default is None)
    return field(default=default, metadata={"rule": rule})


def text(default: str, meaning: str, choices: tuple[str, ...] = ()) -> Any:
    """A setting that is text, or one of a few words."""
    return field(default=default, metadata={"rule": Rule(str, meaning, choices=choices)})


def checked(rule: Rule, source: str, name: str, value: Any) -> Any:
    """The value in the rule's own type. Raises InvalidRequest, which names source and name."""
    if value is None and rule.auto:
        return None
    if rule.kind is float and type(value) is int:
        value = float(value)
    good = type(value) is rule.kind
    if good and rule.choices:
        value = value.strip().lower()
        good = value in rule.choices
    elif good and rule.kind in (int, float):
        good = rule.minimum <= value <= rule.maximum
    if good:
        return value
    raise InvalidRequest(f"{source} {name} must be {rule.expects}, but it is {shown(value)}")
