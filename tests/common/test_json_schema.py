"""Objects of a schema are closed, unless that would change which properties they may have."""

from __future__ import annotations

from typing import Any

import pytest

from common.json_schema import closed

Schema = dict[str, Any]


def _object(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties}


NUMBER: Schema = {"type": "integer"}
OPEN = [
    {"type": "object"},
    NUMBER,
    {"enum": [{"properties": {"a": NUMBER}}]},
    _object(a=NUMBER) | {"additionalProperties": True},
    _object(a=NUMBER) | {"additionalProperties": NUMBER},
    _object(a=NUMBER) | {"unevaluatedProperties": True},
    _object(a=NUMBER) | {"patternProperties": {"^x": NUMBER}},
    _object(a=NUMBER) | {"minProperties": 2},
    _object(a=NUMBER) | {"required": ["b"]},
    {"allOf": [_object(a=NUMBER), _object(b=NUMBER)]},
    _object(a=NUMBER) | {"anyOf": [_object(b=NUMBER), _object(c=NUMBER)]},
    _object(a=NUMBER) | {"$ref": "#/$defs/more", "$defs": {"more": _object(b=NUMBER)}},
    {"type": "array", "items": {"allOf": [_object(a=NUMBER), {"$ref": "#/$defs/more"}]}},
]


@pytest.mark.parametrize("schema", OPEN)
def test_what_may_have_other_properties_is_unchanged(schema: Schema) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "holder",
    [
        lambda inner: inner,
        lambda inner: {"type": "array", "items": inner},
        lambda inner: {"anyOf": [inner, {"type": "null"}]},
        lambda inner: {"allOf": [inner]},
        lambda inner: {"$ref": "#/$defs/it", "$defs": {"it": inner}},
        lambda inner: _object(properties=inner) | {"additionalProperties": True},
        lambda inner: _object(allOf=inner, enum=inner) | {"additionalProperties": True},
    ],
)
def test_an_object_that_lists_its_properties_is_closed(holder: Any) -> None:
    listed = _object(a=NUMBER) | {"required": ["a"]}
    assert closed(holder(listed)) == holder(listed | {"additionalProperties": False})
