"""Tools and tool choices, in every spelling that hosts send."""

from __future__ import annotations

import json

import pytest

from backend.engine.errors import InvalidRequest
from backend.rpc.tools import (
    ToolChoice,
    offered_tools,
    parse_tool_choice,
    parse_tools,
    sorted_tools,
)

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": None}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("", ToolChoice()),
        ("null", ToolChoice()),
        ("auto", ToolChoice()),
        ('"auto"', ToolChoice()),
        ('"none"', ToolChoice("none")),
        ("none", ToolChoice("none")),
        ('"required"', ToolChoice("required")),
        (json.dumps(NAMED), ToolChoice("required", "clock")),
        (json.dumps(json.dumps(NAMED)), ToolChoice("required", "clock")),
        ('{"type":"function","name":"clock"}', ToolChoice("required", "clock")),
        ('{"type":"auto"}', ToolChoice()),
        ('{"type":"any"}', ToolChoice("required")),
        ('{"type":"none"}', ToolChoice("none")),
        ('{"type":"tool","name":"clock"}', ToolChoice("required", "clock")),
    ],
)
def test_every_spelling_of_a_choice(text: str, choice: ToolChoice) -> None:
    assert parse_tool_choice(text) == choice


@pytest.mark.parametrize("text", ["maybe", "17", "[]", '{"type":"function"}', '{"type":"x"}', "{"])
def test_an_unknown_choice_is_an_error(text: str) -> None:
    with pytest.raises(InvalidRequest, match="ToolChoice"):
        parse_tool_choice(text)


def test_tools_are_passed_on_unchanged() -> None:
    assert parse_tools(json.dumps([WEATHER, CLOCK])) == (WEATHER, CLOCK)
    assert parse_tools("") == parse_tools("null") == parse_tools("[]") == ()


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"type":"function"}]', '[{"function":{}}]'])
def test_invalid_tools_are_an_error(text: str) -> None:
    with pytest.raises(InvalidRequest, match="Tools"):
        parse_tools(text)


def test_choice_none_removes_the_tools_and_an_unknown_name_is_refused() -> None:
    assert offered_tools((WEATHER, CLOCK), ToolChoice("none")) == ()
    assert offered_tools((WEATHER, CLOCK), ToolChoice()) == (WEATHER, CLOCK)
    with pytest.raises(InvalidRequest, match="sing"):
        offered_tools((WEATHER,), ToolChoice("required", "sing"))
    with pytest.raises(InvalidRequest, match="empty"):
        offered_tools((), ToolChoice("required"))


def test_equal_tools_in_any_order_give_the_same_key() -> None:
    schema = {"type": "object", "properties": {"why": {}, "answer": {}}}
    look = {"type": "function", "function": {"name": "look", "parameters": schema}}
    turned = {"function": {"parameters": schema, "name": "look"}, "type": "function"}
    ask = {"type": "function", "function": {"name": "ask", "description": "Asks."}}
    orders = ([look, ask], [ask, turned])
    one, other = (json.dumps(sorted_tools(tools)) for tools in orders)
    assert one == other == json.dumps([ask, look])
