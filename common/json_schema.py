"""Prepares JSON schemas for a grammar that enforces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_VALUES = frozenset({"const", "default", "enum", "examples"})  # their members are not schemas
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_PARTS = frozenset("properties $ref allOf anyOf oneOf".split())
_OPEN = frozenset(
    "additionalProperties unevaluatedProperties patternProperties minProperties".split()
)
_MOST = 10**18 - 1
_Change = Callable[[dict[str, Any], bool], dict[str, Any]]
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def without_nulls(schema: Any) -> Any:
    """Return the schema without keywords that are null.

    Programs in Go, Java and .NET write null for keywords that are not set.
    """

    def change(part: dict[str, Any], named: bool) -> dict[str, Any]:
        constant = () if named else ("const",)
        return {key: inner for key, inner in part.items() if inner is not None or key in constant}

    return _changed(schema, change)


def bounded(schema: Any) -> Any:
    """Return the schema without values in which a model could go on until its token limit.

    Objects that list their properties have no others, unless the schema says which. JSON Schema
    allows them, but llama.cpp, xgrammar (vLLM, SGLang) and Outlines forbid them as well. They stay
    allowed in a schema that combines schemas for one object, because each of them may list only a
    part of the properties. Integers have at most 18 digits.
    """
    combined = False

    def look(part: dict[str, Any], named: bool) -> dict[str, Any]:
        nonlocal combined
        combined = combined or (not named and _combines(part))
        return part

    def change(part: dict[str, Any], named: bool) -> dict[str, Any]:
        if named:
            return part
        limits: dict[str, Any] = {}
        if _is_integer(part):
            if not part.keys() & set(_LOWER):
                limits["minimum"] = -_MOST
            if not part.keys() & set(_UPPER):
                limits["maximum"] = _MOST
        if not combined and not _OPEN & part.keys() and _lists_all(part):
            limits["additionalProperties"] = False
        return part | limits

    _changed(schema, look)
    return _changed(schema, change)


def _changed(schema: Any, change: _Change, *, named: bool = False) -> Any:
    """Return the schema with each part replaced by what `change` returns for it.

    change: called with a schema, or with schemas by the names of properties or definitions; the
        parts inside have been replaced.
    named: whether the keys of `schema` are such names.
    """
    if isinstance(schema, list):
        return [_changed(inner, change) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {
        key: inner
        if key in _VALUES and not named
        else _changed(inner, change, named=not named and key in _NAMED)
        for key, inner in schema.items()
    }
    return change(changed, named)


def _combines(schema: Mapping[str, Any]) -> bool:
    """Return whether one value must match several schemas."""
    parts = schema.get("allOf")
    return len(_PARTS & schema.keys()) > 1 or (isinstance(parts, list) and len(parts) > 1)


def _is_integer(schema: Mapping[str, Any]) -> bool:
    """Return whether the schema is one of integers, with no limit above 18 digits."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    limits = [schema[keyword] for keyword in (*_LOWER, *_UPPER) if keyword in schema]
    return (
        "integer" in kinds
        and "number" not in kinds
        and not {"enum", "const"} & schema.keys()
        and all(isinstance(limit, int | float) and abs(limit) <= _MOST for limit in limits)
    )


def _lists_all(schema: Mapping[str, Any]) -> bool:
    """Return whether the schema lists the properties of an object, with all that are required."""
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(properties, Mapping)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    )
