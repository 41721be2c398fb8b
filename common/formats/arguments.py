"""Arguments as the text of a JSON object, where a model wrote them in another form."""

from __future__ import annotations

import re

from common.formats.tool_schema import ToolSchemas
from common.formats.values import MODEL_JSON, as_json, object_of, parts, string_of

_WRAPPERS = frozenset(
    {"arguments", "parameters", "properties", "input", "args", "params", "kwargs"}
)
_NAMES = frozenset({"name", "function"})
PAIR_KEYS = frozenset({"name", "key", "parameter", "argument", "arg"})
"""The keys of an argument's name in a list of arguments; the key of its value is `value`."""
_FIRST_KEY = re.compile(r'\s*\{\s*"((?:[^"\\]|\\.)*)"\s*:')
_NOTHING = (None, "null", "[]")
_NOTHING_IN_STRINGS = ("", "null", "None")


def arguments_of(text: str | None) -> str | None:
    """Return arguments as the text of a JSON object; None if they are something else.

    JSON inside a JSON string is decoded. Where a model writes nothing, null or [], this is `{}`.
    A list may have the object as its only item, or the name and the value of each argument.
    """
    if text in _NOTHING:
        return "{}"
    inner = string_of(text)
    if inner is not None:
        empty = inner.strip() in _NOTHING_IN_STRINGS
        text = "{}" if empty else as_json(inner) or as_json(inner, MODEL_JSON)
    if text and text.startswith("["):
        return _object_in([value for _, value in parts(text)])
    return text if text and text.startswith("{") else None


def _object_in(items: list[str]) -> str | None:
    members = [dict(parts(item)) for item in items if item.startswith("{")]
    pairs = [
        (string_of(each[key]) or "", each["value"])
        for each in members
        for key in each.keys() & PAIR_KEYS
        if each.keys() == {key, "value"}
    ]
    if len(pairs) == len(items):
        return object_of(pairs)
    return items[0] if len(items) == len(members) == 1 else None


def wraps(tools: ToolSchemas, name: str, begun: str) -> bool | None:
    """Return whether arguments that begin like this may be inside another object.

    None if their first key is not complete. A key that the tool declares is an argument.
    """
    found = _FIRST_KEY.match(begun)
    if not found:
        return None
    declared = tools.properties(name)
    return bool(declared) and found[1] not in declared and found[1] in _WRAPPERS | _NAMES


def unwrapped(tools: ToolSchemas, name: str, arguments: str) -> str:
    """Return the arguments without an object around them, such as `{"arguments": {…}}`."""
    if not wraps(tools, name, arguments):
        return arguments
    members = dict(parts(arguments))
    outer = members.keys() - _NAMES
    if len(outer) == 1 and outer <= _WRAPPERS:
        inner = arguments_of(members[outer.pop()])
        if inner and {key for key, _ in parts(inner)} & set(tools.properties(name)):
            return inner
    return arguments
