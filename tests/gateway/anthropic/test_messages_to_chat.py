"""How Anthropic's requests are translated to chat requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError

from common.field_names import named
from gateway.anthropic.request import MessagesRequest, chat_request
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.openai.answering import Translation, placed
from gateway.openai.chat_request import options_of
from tests.gateway.openai.test_chat_to_wire import config_of, gateway_of
from tests.gateway.requests_begun import begun
from wire import backend_pb2 as pb

Json = dict[str, Any]
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
PNG = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
LOOK = {"name": "look", "input_schema": {"type": "object"}}


def translated(*turns: Json, **fields: Any) -> Translation:
    body = {"model": "m", "max_tokens": 5, "messages": list(turns)}
    return chat_request(MessagesRequest.model_validate(body | fields))


def messages(*turns: Json, **fields: Any) -> list[Json]:
    got = translated(*turns, **fields).chat.messages
    return [message.model_dump(exclude_none=True, exclude_defaults=True) for message in got]


def sent(*turns: Json, **fields: Any) -> pb.PredictOptions:
    """What the backend gets. Raises ApiError, as the endpoint would."""
    found = translated(*turns, **fields)
    try:
        return asyncio.run(options_of(found.chat, config_of(), gateway_of()))[0]
    except ApiError as error:
        raise placed(error, found.places) from None


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def test_system_texts_become_one_message_at_the_beginning() -> None:
    got = messages({"role": "system", "content": "b"}, user("hi"), system=[text("a"), text("A")])
    assert got[0] == {"role": "system", "content": "a\n\nA\n\nb"}
    assert got[1]["role"] == "user"


def test_an_assistants_blocks_become_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me see.", "citations": None},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "a cat", "is_error": True}
    got = sent(
        user("hi"), {"role": "assistant", "content": blocks}, user([result, text("So?")])
    ).Messages
    assert (got[1].role, got[1].content) == ("assistant", "Let me see.")
    assert got[1].reasoning_content == "hm"
    function = {"name": "look", "arguments": '{"at": "é"}'}
    assert json.loads(got[1].tool_calls) == [{"id": "t1", "type": "function", "function": function}]
    assert (got[2].role, got[2].tool_call_id, got[2].content) == ("tool", "t1", "Error: a cat")
    assert (got[3].role, got[3].content) == ("user", "So?")
    assert len(got) == 4


def test_images_in_results_are_shown_after_their_texts() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    image = {"type": "image", "source": {**PNG, "data": "iVBORw0KGgo="}}
    inner = [text("one"), image, text("two")]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": inner, "is_error": True}
    turns = [user("hi"), {"role": "assistant", "content": [call]}, user([result])]
    wanted = sent(*turns)
    assert wanted.Messages[2].content == "Error: one\ntwo"
    assert [message.role for message in wanted.Messages[2:]] == ["tool", "user"]
    assert json.loads(wanted.Metadata["mlx.image_messages"]) == [3]
    param = "messages[3].content[0].content[1].image_url"
    places = translated(*turns, system="s").places
    error = placed(ApiError(400, f"{param} is bad", param=param), places)
    assert error.param == "messages[2].content[0].content[1]"


def test_an_image_becomes_a_data_uri_and_an_error_names_its_block() -> None:
    image = {"type": "image", "source": PNG}
    got = translated(user("hi"), user([text("see"), image]), system="s")
    part = got.chat.model_dump()["messages"][2]["content"][1]
    assert part["image_url"]["url"] == "data:image/png;base64,QUJD"
    param = "messages[2].content[1].image_url"
    error = placed(ApiError(400, f"{named(param)} is too large"), got.places)
    assert error.param == "messages[1].content[1]"
    assert error.message == "messages[1].content[1] is too large"


@pytest.mark.parametrize(
    ("choice", "wanted", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
    ],
)
def test_tool_choices(choice: Json, wanted: str, parallel: bool | None) -> None:
    got = translated(user("hi"), tools=[LOOK], tool_choice=choice).chat
    assert (got.tool_choice, got.parallel_tool_calls) == (wanted, parallel)


def test_a_named_tool_and_its_examples() -> None:
    tool = LOOK | {"input_examples": [{"at": "sky"}], "strict": True, "description": "Look."}
    choice = {"type": "tool", "name": "look"}
    got = translated(user("hi"), tools=[tool], tool_choice=choice).chat
    assert got.tool_choice.function.name == "look"  # type: ignore[union-attr]
    assert got.tools is not None
    function = got.tools[0].function
    assert function.parameters == {"type": "object", "examples": [{"at": "sky"}]}
    assert (function.strict, function.description) == (True, "Look.")


def test_sampling_thinking_and_form() -> None:
    schema = {"type": "object"}
    got = translated(
        user("hi"),
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    ).chat
    assert (got.temperature, got.top_p, got.top_k, got.max_tokens) == (0.5, 0.9, 7, 5)
    assert got.stop == ["END"]
    assert (got.enable_thinking, got.thinking_budget) == (True, 1024)
    assert got.reasoning_effort == "low"
    assert got.response_format is not None
    assert got.response_format.json_schema is not None
    assert got.response_format.json_schema.schema_ == schema
    assert translated(user("hi"), thinking={"type": "disabled"}).chat.enable_thinking is False
    assert translated(user("hi"), thinking={"type": "adaptive"}).chat.enable_thinking is None
    limited = translated(user("hi"), thinking={"type": "adaptive", "budget_tokens": 9}).chat
    assert (limited.enable_thinking, limited.thinking_budget) == (None, 9)


def test_a_final_system_message_is_answered_like_a_users() -> None:
    reminder = {"role": "system", "content": "Be brief."}
    for turns in ([user("hi"), reminder], [reminder]):
        last = translated(*turns).chat.messages[-1]
        assert (last.role, len(last.content or "")) == ("user", 1)


def test_a_reminder_stays_where_it_was_in_the_next_turn() -> None:
    """Claude Code ends its first turn with a system message, and sends it again with every turn."""
    first = [user("hi"), {"role": "system", "content": "Be brief."}]
    later = [*first, {"role": "assistant", "content": "Hi."}, user("so?")]
    assert messages(*later)[:2] == messages(*first)


def test_a_final_assistant_message_is_continued() -> None:
    begun = {"role": "assistant", "content": "The"}
    assert translated(user("hi"), begun).chat.continue_final_message
    assert translated(user("hi"), begun, user("so?")).chat.continue_final_message is None


def test_a_call_makes_a_turn_the_assistants() -> None:
    """AgentKit sends the model's calls back in turns of the user."""
    result = {"type": "tool_result", "tool_use_id": CALL["id"], "content": "blue"}
    own = {"role": "assistant", "content": [CALL]}
    assert messages(user("hi"), user([CALL]), user([result])) == messages(
        user("hi"), own, user([result])
    )


@pytest.mark.parametrize(
    ("turns", "fields", "param"),
    [
        ([user("hi"), {"role": "assistant", "content": [CALL]}], {}, "messages[1]"),
        ([user([CALL])], {}, "messages[0]"),
        (
            [{"role": "assistant", "content": [{"type": "image", "source": PNG}]}, user("hi")],
            {},
            "messages[0].content[0]",
        ),
        ([user("hi")], {"tool_choice": {"type": "any"}}, "tool_choice"),
        ([user("hi")], {"tools": [LOOK, LOOK | {"name": "run"}, LOOK]}, "tools[2].name"),
    ],
)
def test_what_cannot_be_translated_is_refused(turns: list[Json], fields: Json, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        sent(*turns, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


TOLD = "The requested tools are not available here: do not claim to have used them."


@pytest.mark.parametrize(
    ("choice", "ignored"),
    [
        ({"type": "any"}, ["tool_choice"]),
        ({"type": "tool", "name": "web_search"}, ["tool_choice"]),
        ({"type": "auto"}, []),
    ],
)
def test_the_model_is_told_if_all_tools_are_the_servers(choice: Json, ignored: list[str]) -> None:
    """Claude Code searches the web by a request with only Anthropic's own tool."""
    running = begun()
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    got = sent(user("Search."), system="Be brief.", tools=[search], tool_choice=choice)
    assert list(running.ignored) == ["tools[][web_search_20250305]", *ignored]
    assert got.Messages[0].content == f"Be brief.\n\n{TOLD}"
    assert not got.Tools


def test_the_servers_tool_cannot_be_demanded_among_others() -> None:
    begun()
    tools = [LOOK, {"type": "web_search_20250305", "name": "web_search"}]
    got = sent(user("Go."), tools=tools, tool_choice={"type": "tool", "name": "web_search"})
    assert got.Messages[0].content == TOLD
    assert got.ToolChoice == '"auto"'


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": "5"}, ("max_tokens",)),
        ({"messages": [{"role": "tool", "content": "x"}]}, ("messages", 0, "role")),
        ({"messages": [user([{"type": "text"}])]}, ("messages", 0, "content", 0, "text")),
        ({"messages": [user([{"type": "pdf"}])]}, ("messages", 0, "content", 0, "type")),
        (
            {"messages": [user([{"type": "image", "source": {"type": "file", "file_id": "a"}}])]},
            ("messages", 0, "content", 0, "source", "type"),
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, ("tools", 0, "type")),
        ({"thinking": {"type": "between_tools"}}, ("thinking", "type")),
        ({"container": "c"}, ("container",)),
    ],
)
def test_errors_name_a_path_of_the_body(
    fields: Json, place: tuple[str | int, ...], strict: Exchange
) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [user("hi")]} | fields
    with pytest.raises(ValidationError) as caught:
        MessagesRequest.model_validate(body)
    assert caught.value.errors()[0]["loc"] == place


def test_the_format_may_be_in_its_older_place() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    new, old = (
        translated(user("hi"), output_config={"format": form}),
        translated(user("hi"), output_format=form),
    )
    assert old.chat == new.chat
    assert old.chat.response_format is not None
    both = translated(user("hi"), output_format=form, output_config={"format": form})
    assert both.chat == new.chat
    other = form | {"schema": {"type": "array"}}
    with pytest.raises(ApiError) as caught:
        translated(user("hi"), output_format=other, output_config={"format": form})
    assert caught.value.param == "output_format"
