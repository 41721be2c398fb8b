"""What is unbounded in a schema is bounded, unless the schema would then exclude what it names."""

from __future__ import annotations

from typing import Any

import pytest

from common.json_schema import bounded

Schema = dict[str, Any]


def _object(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties}


NUMBER: Schema = {"type": "number"}
MOST = 10**18 - 1
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
    assert bounded(schema) == schema


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
def test_an_object_that_lists_its_properties_is_bounded(holder: Any) -> None:
    listed = _object(a=NUMBER) | {"required": ["a"]}
    assert bounded(holder(listed)) == holder(listed | {"additionalProperties": False})


@pytest.mark.parametrize(
    ("schema", "added"),
    [
        ({"type": "integer"}, {"minimum": -MOST, "maximum": MOST}),
        ({"type": ["integer", "null"]}, {"minimum": -MOST, "maximum": MOST}),
        ({"type": "integer", "default": 3}, {"minimum": -MOST, "maximum": MOST}),
        ({"type": "integer", "examples": [3]}, {"minimum": -MOST, "maximum": MOST}),
        ({"type": "integer", "minimum": 3}, {"maximum": MOST}),
        ({"type": "integer", "exclusiveMaximum": 3}, {"minimum": -MOST}),
        ({"type": "integer", "maximum": 10**20, "minimum": 0}, {}),
        ({"type": "integer", "minimum": 10**20}, {}),
        ({"type": "integer", "enum": [10**20]}, {}),
        ({"type": ["integer", "number"]}, {}),
        ({"type": "string"}, {}),
    ],
)
def test_an_integer_has_at_most_18_digits(schema: Schema, added: Schema) -> None:
    inside = {"allOf": [_object(a=schema), _object(b=NUMBER)]}
    assert bounded(schema) == schema | added
    assert bounded(inside) == {"allOf": [_object(a=schema | added), _object(b=NUMBER)]}
