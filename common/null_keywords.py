"""Removes null from JSON schemas.

Programs in Go, Java and .NET write null for keywords that are not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VALUES = frozenset({"const", "default", "enum", "examples"})  # their members are not schemas
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


def without_nulls(schema: Any, *, named: bool = False) -> Any:
    """Return the schema without keywords that are null.

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
