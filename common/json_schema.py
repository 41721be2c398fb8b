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


def closed(schema: Any) -> Any:
    """Return the schema with additional properties forbidden in objects that list their properties.

    JSON Schema allows them unless the schema says otherwise, but then a model can invent properties
    until its token limit. llama.cpp, xgrammar (vLLM, SGLang) and Outlines forbid them as well. An
    object that says which other properties it has is left unchanged. So is a whole schema that
    combines schemas for one object, because each of them may list only a part of the properties.
    """
    return schema if _joins(schema, named=False) else _closed(schema, named=False)


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


def _closed(schema: Any, *, named: bool) -> Any:
    if isinstance(schema, list):
        return [_closed(inner, named=False) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {
        key: inner
        if key in _VALUES and not named
        else _closed(inner, named=not named and key in _NAMED)
        for key, inner in schema.items()
    }
    properties, required = schema.get("properties"), schema.get("required", [])
    if named or not isinstance(properties, Mapping) or _OPEN & schema.keys():
        return result
    if isinstance(required, list) and all(
        isinstance(name, str) and name in properties for name in required
    ):
        result["additionalProperties"] = False
    return result
