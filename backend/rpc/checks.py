"""Checks that several kinds of requests share. All of them raise InvalidRequest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from typing import Any, TypeVar

from backend.engine.errors import InvalidRequest
from common.field_names import named
from common.wording import json_fault

T = TypeVar("T", dict[str, Any], list[Any])
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
_KINDS |= {int: "a number", float: "a number"}


def require_alone(
    field: str, others: Mapping[str, object], advice: str = "send one of them"
) -> None:
    """Refuse a field that was sent together with one of these others.

    others: their values by name; a value that counts as false was not sent.
    """
    for name, given in others.items():
        if given:
            raise InvalidRequest(f"{named(field)} and {named(name)} are both given: {advice}")


def require_most(field: str, values: Sized, most: int, what: str = "entries") -> None:
    """Refuse a list or a string that is too long."""
    if len(values) > most:
        raise InvalidRequest(f"{named(field)} has {len(values)} {what}: send at most {most}")


def require_least(field: str, value: int, least: int, advice: str) -> None:
    """Refuse a number that is too small."""
    if value < least:
        raise InvalidRequest(f"{named(field)} is {value}: send {advice}")


def json_value(kind: type[T], name: str, text: str, what: str = "a JSON object") -> T:
    """Return the decoded value of a type; blank text and null count as an empty one.

    name: the field's name, for InvalidRequest.
    text: not quoted in errors, because errors are logged and the text may be a user's.
    what: the expected content, for InvalidRequest.
    """
    if not text.strip():
        return kind()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{named(name)} is not valid JSON: {json_fault(error)}") from None
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise InvalidRequest(f"{named(name)} must be {what}, but it is {_KINDS[type(value)]}")
    return value
