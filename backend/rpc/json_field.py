"""Reads a text field that contains a JSON object."""

from __future__ import annotations

import json
from typing import Any

from backend.engine.errors import InvalidRequest
from common.field_names import named
from common.wording import json_fault

_KINDS = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}


def json_object(name: str, text: str, what: str = "a JSON object") -> dict[str, Any]:
    """Return the decoded object; blank text and null count as an empty object.

    name: the field's name, for InvalidRequest.
    text: not quoted in errors, because errors are logged and the text may be a user's.
    what: the expected content, for InvalidRequest.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{named(name)} is not valid JSON: {json_fault(error)}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{named(name)} must be {what}, but it is {_KINDS[type(value)]}")
    return value
