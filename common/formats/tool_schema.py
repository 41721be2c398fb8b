"""Turns arguments that were written in another form into JSON, by the types in the tool's schema.

A text such as `42` may be a number or a string; only the tool's schema says which. If the schema
allows several types, the most specific type that fits the text is used, because templates write
strings and numbers alike. Numbers keep the digits that the model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

from common.formats.json_text import json_string, number_of
from common.formats.values import MODEL_JSON, PYTHON_JSON, as_json, object_of, parts, string_of

Undeclared = Literal["text", "guess", "json"]
"""The type of an argument that is not declared: a string, or inferred from its text; or JSON, as
the declared ones are too.
"""

_WRAPPERS = frozenset(
    {"arguments", "parameters", "properties", "input", "args", "params", "kwargs"}
)
_NAMES = frozenset({"name", "function"})
PAIR_KEYS = frozenset({"name", "key", "parameter", "argument", "arg"})
"""The keys of an argument's name in a list of arguments; the key of its value is `value`."""
_FIRST_KEY = re.compile(r'\s*\{\s*"((?:[^"\\]|\\.)*)"\s*:')
_NOTHING = (None, "null", "[]")
_NOTHING_IN_STRINGS = ("", "null", "None")
_MARKUP = re.compile(r"""<\|?[\w"]+\|?>(?:commentary|analysis|final|json)?|</\w+>?\Z""")
_INDEX = re.compile(r":\d+\Z")  # of `functions.NAME:0`, which is a call's id
_AROUND_NAME = " \t\r\n\"'`:*"
_NAME_SEPARATOR = re.compile(r"(?<=[\w-])(?:[.:/]|__)")
_SPELLING = re.compile(r"[\s_./:-]")
_NUMBER_BEGUN = re.compile(r"[+-]?[0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]*)?")
_MOST_STORED = 1000
"""The most answers about a request's tools that are stored: models write any number of names."""
_NESTED = ("object",)
_LITERALS = ("null", "boolean", "number", "object")
_ALIASES = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number",
    "double": "number", "bool": "boolean", "dict": "object", "list": "array", "tuple": "array",
    "none": "null",
}  # fmt: skip
"""Type names that hosts and hand-written tools use instead of JSON Schema's."""


class ToolSchemas:
    """The tools of a request, by name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        # Methods would refer to this object, which then only the garbage collector could free.
        self._types = lru_cache(_MOST_STORED)(partial(_types_at, self._parameters))
        self._properties = lru_cache(_MOST_STORED)(partial(_properties_of, self._parameters))
        self._meant: dict[str, str] = {}
        for tool in tools:
            function = tool.get("function") if isinstance(tool, Mapping) else None
            entry = function if isinstance(function, Mapping) else tool
            if isinstance(entry, Mapping) and isinstance(name := entry.get("name"), str):
                parameters = entry.get("parameters")
                self._parameters[name] = parameters if isinstance(parameters, Mapping) else {}

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    def meant(self, name: str) -> str:
        """Return the offered tool that a model means by a name with a prefix or with markup in it.

        Models write `functions.NAME`, `default_api:NAME`, `google:mcp:NAME`, `NAME.NAME`,
        `NAME.call`, quotes around the name, tokens before and after it, or the name without its
        prefix or in another spelling, if only one tool can be meant.
        """
        if name in self._parameters:
            return name
        if name not in self._meant:
            if len(self._meant) >= _MOST_STORED:
                self._meant.clear()
            self._meant[name] = self._offered(name)
        return self._meant[name]

    def _offered(self, name: str) -> str:
        bare = _INDEX.sub("", _MARKUP.sub("", name).strip(_AROUND_NAME))
        found = [bare, bare.removesuffix(".call")]
        if not re.search(r"\s", bare):
            found += [bare[match.end() :] for match in _NAME_SEPARATOR.finditer(bare)]
        known = [each for each in found if each in self]
        known = known or [
            n
            for place, each in enumerate(found)
            for n in self._similar.get(_spelt(each), ())
            if place < 2 or _spelt(n) == _spelt(each)  # the prefix is not another tool's
        ]
        return known[0] if known else name

    @cached_property
    def _similar(self) -> Mapping[str, list[str]]:
        """The tools that each string may mean: a name, or the end of one, in another spelling."""
        meanings: dict[str, list[str]] = {}
        for name in self._parameters:
            ends = [name[match.end() :] for match in _NAME_SEPARATOR.finditer(name)]
            for end in dict.fromkeys(map(_spelt, [name, *ends])):
                meanings.setdefault(end, []).append(name)
        return {end: names for end, names in meanings.items() if end and len(names) == 1}

    def properties(self, name: str) -> list[str]:
        """Return the declared arguments of a tool, in order."""
        return self._properties(name)

    def takes_nothing(self, name: str) -> bool:
        """Return whether a tool was offered and declares no arguments."""
        return self.meant(name) in self and not self.properties(self.meant(name))

    def lacks(self, name: str, arguments: Iterable[str]) -> bool:
        """Return whether a required argument of the tool is missing from these."""
        required = self._parameters.get(name, {}).get("required")
        given = set(arguments)
        return isinstance(required, list) and any(
            key not in given for key in required if isinstance(key, str)
        )

    def accepting(self, arguments: Iterable[str]) -> list[str]:
        """Return the tools that declare all of these arguments and require no others."""
        given = set(arguments)
        return [
            name
            for name in self._parameters
            if given <= set(self.properties(name)) and not self.lacks(name, given)
        ]

    def typed(self, name: str, argument: str, text: str, undeclared: Undeclared) -> str:
        """Return an argument that was written as bare text, as JSON."""
        types = self.types_at(name, (argument,))
        return _typed(text, types) if types else _looks_like(text, undeclared == "text")

    def types_at(self, name: str, path: Sequence[str | None]) -> frozenset[str]:
        """Return the declared types of an argument, or of a value inside it.

        path: the argument's name, then the name of each member, or None for an item of a list.
        """
        return self._types(name, tuple(path))

    def excludes_text(self, name: str, argument: str) -> bool:
        """Return whether the argument is declared, and not as a string."""
        types = self.types_at(name, (argument,))
        return bool(types) and "string" not in types

    def retyped(self, name: str, argument: str, text: str) -> str:
        """Return an argument that was written as a string, as JSON.

        It has another type only if no string is allowed, and the text is a value of that type.
        """
        if not self.excludes_text(name, argument) or text != text.strip():
            return json_string(text)
        return _typed(text, self.types_at(name, (argument,)))

    def typed_at(self, name: str, path: Sequence[str | None], text: str) -> str:
        """Return the value at this path, as JSON, if it was written as bare text."""
        types = self.types_at(name, path)
        if not types:
            return _looks_like(text, True)
        if not text.strip() and "string" not in types and types & {"array", "object"}:
            return "[]" if "array" in types else "{}"
        return _typed(text, types)

    def is_text(self, name: str, argument: str, begun: str, undeclared: Undeclared) -> bool:
        """Return whether `typed` returns a string for every text that begins like this."""
        types, bare = self.types_at(name, (argument,)), begun.strip()
        if not types:
            kinds = _NESTED if undeclared == "text" else _LITERALS
            return bool(bare) and bare[0] != '"' and all(_excludes(bare, kind) for kind in kinds)
        others = types - {"string"}
        return "string" in types and all(_excludes(bare, kind) for kind in others)


def _spelt(name: str) -> str:
    return _SPELLING.sub("", name).casefold()


def _excludes(begun: str, kind: str) -> bool:
    """Return whether no text that begins like this can have this type."""
    if not begun:
        return False
    match kind:
        case "null":
            return not any(word.startswith(begun) for word in ("null", "None"))
        case "boolean":
            return not any(word.startswith(begun.lower()) for word in ("true", "false"))
        case "integer" | "number":
            return not _NUMBER_BEGUN.fullmatch(begun)
        case "object" | "array":
            return begun[0] not in "{["
    return False


def _properties_of(parameters: Mapping[str, Mapping[str, Any]], name: str) -> list[str]:
    root = parameters.get(name, {})
    found = [schema.get("properties") for schema in _alternatives(root, root)]
    return list(dict.fromkeys(key for each in found if isinstance(each, Mapping) for key in each))


def _types_at(
    parameters: Mapping[str, Mapping[str, Any]], name: str, path: tuple[str | None, ...]
) -> frozenset[str]:
    schema: Any = (root := parameters.get(name, {}))
    for step in path:
        schema = _inner(schema, root, step)
    return types_of(schema, root)


def _alternatives(schema: Any, root: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Yield a schema and all its subschemas and references, each once.

    References may be circular.
    """
    queue, seen = [schema], set()
    while queue:
        entry = queue.pop(0)
        if not isinstance(entry, Mapping) or id(entry) in seen:
            continue
        seen.add(id(entry))
        yield entry
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(entry.get(key), list):
                queue.extend(entry[key])
        if isinstance(reference := entry.get("$ref"), str):
            queue.append(referenced(reference, root))


def _inner(schema: Any, root: Mapping[str, Any], step: str | None) -> Any:
    """Return the schema of a member of an object, or of the items (None) of a list."""
    for entry in _alternatives(schema, root):
        properties = entry.get("properties")
        found = properties.get(step) if isinstance(properties, Mapping) else None
        found = entry.get("items") if step is None else found or entry.get("additionalProperties")
        if isinstance(found, Mapping):
            return found
    return None


def referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference in a schema points to; None if it points to nothing."""
    target: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if step:
            target = target.get(step) if isinstance(target, Mapping) else None
    return target


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema declares, or that its other keywords show."""
    found: set[str] = set()
    for entry in _alternatives(schema, root):
        declared = entry.get("type")
        names = declared if isinstance(declared, list) else [declared]
        found.update(_ALIASES.get(n.lower(), n.lower()) for n in names if isinstance(n, str))
        if declared is None:
            values = entry.get("enum") if isinstance(entry.get("enum"), list) else []
            values = [*(values or []), *([entry["const"]] if "const" in entry else [])]
            found.update(_type_of(value) for value in values)
            found.update({"object"} if "properties" in entry else ())
            found.update({"array"} if "items" in entry else ())
        found.update({"null"} if entry.get("nullable") is True else ())
    return frozenset(found)


def _type_of(value: Any) -> str:
    kinds = {"NoneType": "null", "int": "number", "float": "number"}
    name = type(value).__name__
    return kinds.get(name, _ALIASES.get(name, "object"))


def _typed(text: str, types: frozenset[str]) -> str:
    bare = text.strip()
    if bare in ("null", "None") and ("null" in types or "string" not in types):
        return "null"
    if types & {"integer", "number"} and (number := number_of(bare)):
        return number
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    quoted = as_json(bare) if "string" not in types and bare.startswith('"') else None
    if quoted:
        return _typed(string_of(quoted) or "", types)
    if types & {"object", "array"} and bare[:1] in ("{", "["):
        opening = {"{": "object", "[": "array"}[bare[0]]
        dialect = PYTHON_JSON if "string" in types else MODEL_JSON
        value = as_json(bare) or as_json(bare, dialect) or as_json(_unescaped(bare))
        if value and (opening in types or "string" not in types):
            return value
    return json_string(text) if "string" in types else _looks_like(text)


def _unescaped(text: str) -> str:
    """Return JSON that the model escaped as if it were in a string; '' for other text."""
    decoded = as_json(f'"{text}"')
    return string_of(decoded) or "" if decoded else ""


def _looks_like(text: str, only_nested: bool = False) -> str:
    bare = text.strip()
    if only_nested and bare[:1] not in ("{", "["):
        return json_string(text)
    if bare in ("True", "False", "None"):
        return {"True": "true", "False": "false", "None": "null"}[bare]
    return as_json(bare) or json_string(text)


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
