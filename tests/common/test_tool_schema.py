"""Bare text gets the type that the tool's schema declares."""

from __future__ import annotations

from typing import Any

import pytest

from common.formats.tool_schema import ToolSchemas

NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
LOOP = {"$ref": "#/$defs/loop"}


def _typed(schema: Any, text: str) -> str:
    parameters = {
        "type": "object",
        "properties": {"x": schema},
        "$defs": {"size": {"type": "integer"}, "loop": {"anyOf": [LOOP, {"type": "boolean"}]}},
    }
    tools = ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    return tools.typed("f", "x", text, "text")


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, " 12 ", '" 12 "'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, '{"a": 1}', '"{\\"a\\": 1}"'),
        ({"type": "integer"}, " 9007199254740993\n", "9007199254740993"),
        ({"type": "integer"}, "+007", "7"),
        ({"type": "integer"}, "1e3", "1e3"),
        ({"type": "integer"}, "many", '"many"'),
        ({"type": "number"}, ".5", "0.5"),
        ({"type": "number"}, "-2.", "-2"),
        ({"type": "number"}, "1E-5", "1E-5"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": "object"}, "{'a': None}", '{"a": null}'),
        ({"type": "array"}, "[1,", '"[1,"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "integer"]}, "12", "12"),
        ({"type": "string", "nullable": True}, "null", "null"),
        (NULLABLE, "null", "null"),
        (NULLABLE, "3", "3"),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1]", "[1]"),
        ({"allOf": [{"$ref": "#/$defs/size"}]}, "4", "4"),
        ({"$ref": "#/$defs/size"}, "4", "4"),
        (LOOP, "false", "false"),
        ({"$ref": "#/nowhere"}, "4", '"4"'),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["1", "2"]}, "2", '"2"'),
        ({"const": None}, "null", "null"),
        ({"properties": {}}, "{}", "{}"),
        ({"items": {}}, "[]", "[]"),
        ({"type": "list"}, "[]", "[]"),
        ({"type": 3}, "x", '"x"'),
        (True, "x", '"x"'),
        (None, '{"a": 1}', '{"a": 1}'),
        (None, "12", '"12"'),
    ],
)
def test_typed(schema: Any, text: str, expected: str) -> None:
    assert _typed(schema, text) == expected


def test_undeclared_arguments() -> None:
    tools = ToolSchemas([{"name": "f", "parameters": None}])
    assert tools.typed("f", "x", "12", "text") == '"12"'
    assert tools.typed("f", "x", "12", "guess") == "12"
    assert tools.typed("f", "x", "True", "guess") == "true"
    assert tools.typed("nobody", "x", "a b", "guess") == '"a b"'


def test_invalid_tools_are_ignored() -> None:
    broken: list[Any] = [{}, {"function": None}, {"function": {"name": 3}}, "tool"]
    assert not ToolSchemas(broken)


def test_required_arguments_of_a_tool() -> None:
    parameters = {"properties": {"a": {}, "b": {}}, "required": ["a"]}
    tools = ToolSchemas([{"name": "f", "parameters": parameters}, {"name": "g"}])
    assert tools.lacks("f", ["b"])
    assert not tools.lacks("f", ["a"])
    assert tools.accepting(["a"]) == ["f"]
    assert tools.accepting([]) == ["g"]


@pytest.mark.parametrize(
    "written", ["github/create_issue", "github:create-issue", "GitHub.createIssue"]
)
def test_a_name_with_other_separators_means_the_only_tool_that_it_can(written: str) -> None:
    tools = ToolSchemas(
        [{"name": "mcp__github__create_issue"}, {"name": "mcp__git__create_branch"}]
    )
    assert tools.meant(written) == "mcp__github__create_issue"
