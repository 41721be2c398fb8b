"""Prepares JSON schemas for a grammar that enforces them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VALUES = frozenset({"const", "default", "enum", "examples"})  # their members are not schemas
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_PARTS = frozenset("properties $ref allOf anyOf oneOf".split())
_OPEN = frozenset(
    "additionalProperties unevaluatedProperties patternProperties minProperties".split()
)
_MOST = 10**18 - 1
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def without_nulls(schema: Any, *, named: bool = False) -> Any:
    """Return the schema without keywords that are null.

    Programs in Go, Java and .NET write null for keywords that are not set.

    named: whether the keys of `schema` are not keywords but names of properties or definitions.
    """
    if isinstance(schema, list):
        return [without_nulls(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: inner
        if key in _VALUES and not named
        else without_nulls(inner, named=not named and key in _NAMED)
        for key, inner in schema.items()
        if inner is not None or (key == "const" and not named)
    }


def bounded(schema: Any) -> Any:
    """Return the schema without values in which a model could go on until its token limit.

    Objects that list their properties have no others, unless the schema says which. JSON Schema
    allows them, but llama.cpp, xgrammar (vLLM, SGLang) and Outlines forbid them as well. They stay
    allowed in a schema that combines schemas for one object, because each of them may list only a
    part of the properties. Integers have at most 18 digits.
    """
    return _bounded(schema, named=False, closes=not _joins(schema, named=False))


def _joins(schema: Any, *, named: bool) -> bool:
    if isinstance(schema, list):
        return any(_joins(inner, named=False) for inner in schema)
    if not isinstance(schema, Mapping):
        return False
    if not named:
        parts = schema.get("allOf")
        if len(_PARTS & schema.keys()) > 1 or (isinstance(parts, list) and len(parts) > 1):
            return True
    return any(
        _joins(inner, named=not named and key in _NAMED)
        for key, inner in schema.items()
        if named or key not in _VALUES
    )


def _bounded(schema: Any, *, named: bool, closes: bool) -> Any:
    if isinstance(schema, list):
        return [_bounded(inner, named=False, closes=closes) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {
        key: inner
        if key in _VALUES and not named
        else _bounded(inner, named=not named and key in _NAMED, closes=closes)
        for key, inner in schema.items()
    }
    if named:
        return result
    if _is_integer(schema):
        if not schema.keys() & set(_LOWER):
            result["minimum"] = -_MOST
        if not schema.keys() & set(_UPPER):
            result["maximum"] = _MOST
    if closes and not _OPEN & schema.keys() and _lists_all(schema):
        result["additionalProperties"] = False
    return result


def _is_integer(schema: Mapping[str, Any]) -> bool:
    """Return whether the schema is one of integers, with no limit above 18 digits."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    limits = [schema[keyword] for keyword in (*_LOWER, *_UPPER) if keyword in schema]
    return (
        "integer" in kinds
        and "number" not in kinds
        and not _VALUES & schema.keys()
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
