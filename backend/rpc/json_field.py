"""A text field that holds a JSON object."""

from __future__ import annotations

import json
from typing import Any

from backend.engine.errors import InvalidRequest

_KINDS = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}


def json_object(name: str, text: str, what: str = "a JSON object") -> dict[str, Any]:
    """The object; a blank text and null are an empty one.

    name, what: of the field and of what it should hold, for InvalidRequest. Its sentence does not
    quote the text, because the log shows it, and a user may have written it.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}", name) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be {what}, but it is {_KINDS[type(value)]}", name)
    return value
