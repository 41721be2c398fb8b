"""Tools, calls and results as text: nothing is lost, and answers in the same form are parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chat_format import ChatFormat
from common.chat_parser import parse_chat
from common.tool_text import mentions_calls, with_tools_as_text

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Das Wetter in einer Stadt: 12°?",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time", "parameters": None}}
HERMES = ChatFormat.named("hermes")


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = _message("user", "What is the weather?")
CALLED = {**_message("assistant", ""), "tool_calls": [_call("get_weather", city="Köln")]}
RESULT = {**_message("tool", "12°"), "tool_call_id": "c1", "name": "get_weather"}


def test_a_conversation_without_tools_is_unchanged() -> None:
    messages = (_message("system", "Be brief."), ASKED, _message("assistant", "No."))
    assert with_tools_as_text(messages) == messages
    assert not mentions_calls(messages)
    assert mentions_calls([ASKED, CALLED])
    assert mentions_calls([RESULT])


def test_tools_follow_the_system_prompt() -> None:
    system, user = with_tools_as_text([_message("system", "Be brief."), ASKED], [WEATHER, TIME])
    assert user == ASKED
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\n")
    lines = system["content"].splitlines()
    weather, time = (json.loads(line) for line in lines if line.startswith('{"name": "get'))
    shown = ("name", "description", "parameters")
    assert weather == {key: WEATHER["function"][key] for key in shown}
    assert time == {"name": "get_time"}
    assert "12°?" in system["content"]


def test_a_system_message_is_added_if_there_is_none() -> None:
    system, user = with_tools_as_text([ASKED], [WEATHER])
    assert (system["role"], user) == ("system", ASKED)
    assert system["content"].strip() == system["content"]


def test_tools_precede_the_first_question_if_system_messages_are_not_allowed() -> None:
    hello = _message("assistant", "Hello.")
    first, second, third = with_tools_as_text([hello, ASKED, ASKED], [WEATHER], system=False)
    assert (first, third) == (hello, ASKED)
    assert "get_weather" in second["content"]
    assert second["content"].endswith("\n\nWhat is the weather?")
    alone = with_tools_as_text([hello], [WEATHER], system=False)
    assert [message["role"] for message in alone] == ["user", "assistant"]


def test_roles_alternate_for_any_number_of_results() -> None:
    many = {**CALLED, "tool_calls": CALLED["tool_calls"] * 2}
    messages = [
        ASKED,
        many,
        RESULT,
        _message("function", ""),
        ASKED,
        _message("assistant", "Cold."),
    ]
    rewritten = with_tools_as_text(messages)
    assert [message["role"] for message in rewritten] == ["user", "assistant", "user", "assistant"]
    assert rewritten[2] == _message(
        "user",
        "<tool_response>\n12°\n</tool_response>\n<tool_response>\n</tool_response>\n\n"
        "What is the weather?",
    )
    assert [message["role"] for message in with_tools_as_text([ASKED, ASKED])] == ["user", "user"]


_TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
_VALUES = st.one_of(st.none(), st.booleans(), st.integers(), _TEXTS, st.lists(_TEXTS, max_size=2))


@given(st.lists(st.dictionaries(st.sampled_from("xyz"), _VALUES), min_size=1, max_size=3))
def test_calls_are_written_in_the_format_that_is_parsed(arguments: list[dict[str, Any]]) -> None:
    calls = [_call("get_weather", **each) for each in arguments]
    (rewritten,) = with_tools_as_text(
        [{**_message("assistant", "Let me see."), "tool_calls": calls}]
    )
    assert "tool_calls" not in rewritten
    read = parse_chat(rewritten["content"], HERMES, tools=[WEATHER])
    assert read.content == "Let me see."
    assert [(call.name, json.loads(call.arguments)) for call in read.tool_calls] == [
        ("get_weather", each) for each in arguments
    ]


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ({"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1}}),
        ({"function": {"name": "f"}}, {"name": "f", "arguments": {}}),
        ({"function": {"name": "f", "arguments": "b"}}, {"name": "f", "arguments": "b"}),
    ],
)
def test_calls_in_other_formats(call: dict[str, Any], written: dict[str, Any]) -> None:
    message = {**_message("assistant", ""), "reasoning_content": "Hm.", "tool_calls": [call]}
    (rewritten,) = with_tools_as_text([message])
    inside = rewritten["content"].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(inside) == written
    assert rewritten["reasoning_content"] == "Hm."


def _text_of(content: list[dict[str, Any]]) -> str:
    return "".join(part.get("text", "<image>") for part in content)


def test_contents_in_parts_give_the_same_text() -> None:
    picture = {"type": "image"}
    messages = [_message("system", "Be brief."), ASKED, CALLED, RESULT, RESULT, ASKED]
    parted = [
        {**each, "content": [{"type": "text", "text": each["content"]}] if each["content"] else []}
        for each in messages
    ]
    for system in (True, False):
        rewritten = with_tools_as_text(messages, [WEATHER], system=system)
        in_parts = with_tools_as_text(parted, [WEATHER], system=system, lists=True)
        assert [_text_of(message["content"]) for message in in_parts] == [
            message["content"] for message in rewritten
        ]
    (made, seen) = with_tools_as_text([_message("user", [picture])], [WEATHER], lists=True)
    assert isinstance(made["content"], list)
    assert seen["content"] == [picture]
    (seen,) = with_tools_as_text([_message("user", [picture])], [WEATHER], system=False)
    assert seen["content"][-1] == picture
    assert "get_weather" in _text_of(seen["content"])
