"""Protocol messages become template dicts without losing anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.errors import InvalidRequest
from backend.rpc.template_messages import template_messages
from wire import backend_pb2 as pb


def sent(
    role: str = "user",
    content: str = "",
    name: str = "",
    tool_call_id: str = "",
    reasoning_content: str = "",
    tool_calls: str = "",
) -> pb.Message:
    return pb.Message(
        role=role,
        content=content,
        name=name,
        tool_call_id=tool_call_id,
        reasoning_content=reasoning_content,
        tool_calls=tool_calls,
    )


def calls(arguments: object) -> str:
    function = {"name": "f", "arguments": arguments}
    return json.dumps([{"index": 0, "id": "c1", "type": "function", "function": function}])


def test_a_bare_message_has_only_role_and_content() -> None:
    assert template_messages([sent("system")]) == ({"role": "system", "content": ""},)


def test_every_field_keeps_its_own_name() -> None:
    message = sent("tool", "12°", "weather", "c1", "hm", calls("{}"))
    (entry,) = template_messages([message])
    assert entry.pop("tool_calls")[0]["id"] == "c1"
    assert entry == {
        "role": "tool",
        "content": "12°",
        "name": "weather",
        "tool_call_id": "c1",
        "reasoning_content": "hm",
        "reasoning": "hm",
    }


@pytest.mark.parametrize(
    ("result_sent", "name", "identifier"),
    [
        (sent("tool", tool_call_id="c1"), "f", "c1"),  # OpenAI's API: results have no name
        (sent("tool", name="c1"), "f", "c1"),  # LocalAI's Responses: the id is the name
        (sent("tool", name="g", tool_call_id="c1"), "g", "c1"),
        (sent("tool", name="f"), "f", None),
        (sent("tool", tool_call_id="c2"), None, "c2"),
        (sent("tool"), None, None),
        (sent("user", name="c1"), "c1", None),
    ],
)
def test_a_result_has_the_id_and_the_name_of_its_call(
    result_sent: pb.Message, name: str | None, identifier: str | None
) -> None:
    *_, result = template_messages([sent("assistant", tool_calls=calls("{}")), result_sent])
    assert (result.get("name"), result.get("tool_call_id")) == (name, identifier)


@pytest.mark.parametrize("content", ["", "So."])
@pytest.mark.parametrize("called", ["", calls("{}")])
def test_templates_get_reasoning_under_their_own_name(content: str, called: str) -> None:
    """Qwen reads `reasoning_content`, Gemma 4 `reasoning`, gpt-oss `thinking`."""
    message = sent("assistant", content, reasoning_content="hm", tool_calls=called)
    (entry,) = template_messages([message])
    assert entry["reasoning_content"] == entry["reasoning"] == "hm"
    # gpt-oss's template refuses it beside content and calls.
    assert entry.get("thinking") == (None if content and called else "hm")


@pytest.mark.parametrize("role", ["developer", "function", "my role"])
def test_roles_are_passed_on_as_given(role: str) -> None:
    assert template_messages([sent(role)])[0]["role"] == role


@pytest.mark.parametrize(
    ("given_arguments", "seen"),
    [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ("{}", {}),
        ("", {}),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ({"city": "Rome"}, {"city": "Rome"}),
        (None, None),
    ],
)
def test_arguments_are_decoded_if_they_are_an_object(given_arguments: object, seen: object) -> None:
    (entry,) = template_messages([sent(tool_calls=calls(given_arguments))])
    assert entry["tool_calls"] == [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": seen}}
    ]


@pytest.mark.parametrize("text", ["", "  ", "[]", "null"])
def test_a_message_without_calls_has_no_key_for_them(text: str) -> None:
    assert "tool_calls" not in template_messages([sent(tool_calls=text)])[0]


@pytest.mark.parametrize("text", ["{", "{}", '"x"', "[1]", "7", "[" * 100_000])
def test_unreadable_calls_name_the_message(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"Messages\[1\]\.tool_calls"):
        template_messages([sent(), sent(tool_calls=text)])


def test_a_message_without_a_role_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"Messages\[0\] has no role"):
        template_messages([sent(role="")])


@given(st.text())
def test_any_text_of_calls_is_parsed_or_refused_with_a_message(text: str) -> None:
    refused = ""
    entries: tuple[dict[str, Any], ...] = ({},)
    try:
        entries = template_messages([sent(tool_calls=text)])
    except InvalidRequest as error:
        refused = str(error)
    assert refused.startswith("Messages[0].tool_calls") or refused == ""
    assert all(isinstance(call, dict) for call in entries[0].get("tool_calls", []))


def test_a_line_that_changes_with_every_request_is_removed() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.330; cch=0a1b2;"
    for text, left in (
        (f"{line}\n\nYou are an agent.", "You are an agent."),
        (f"You are an agent.\n\n{line}\n\nBe brief.", "You are an agent.\n\nBe brief."),
        (line, ""),
        (f"The header {line}", f"The header {line}"),
    ):
        assert template_messages([sent("system", text)])[0]["content"] == left
        assert template_messages([sent("user", text)])[0]["content"] == text
