"""How Responses requests are translated to chat requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.openai.answering import Translation, placed
from gateway.openai.messages import ContentPart
from gateway.responses.items import ITEMS
from gateway.responses.request import ResponsesRequest, chat_request
from gateway.responses.store import Store, items_of
from tests.gateway.requests_begun import begun

Json = dict[str, Any]
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":"sky"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "blue"}


def translated(
    given: Any = "hi", *, earlier: list[Json] | None = None, **fields: Any
) -> Translation:
    body = {"model": "m", "input": given} | fields
    request = ResponsesRequest.model_validate(body)
    return chat_request(
        request, items_of(Store().resolved(request.input)), ITEMS.validate_python(earlier or [])
    )


def messages(given: Any = "hi", **fields: Any) -> list[Json]:
    converted = translated(given, **fields).chat.messages
    return [message.model_dump(exclude_none=True, exclude_defaults=True) for message in converted]


def message_item(role: str, *texts: str) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "content": [{"type": kind, "text": text} for text in texts]}


def test_a_text_is_a_user_message_after_the_instructions() -> None:
    converted = messages("hi", instructions="Be brief.")
    assert converted[0] == {"role": "system", "content": "Be brief."}
    assert converted[1] == {"role": "user", "content": [{"type": "text", "text": "hi"}]}


def test_an_item_whose_type_is_null_is_a_message() -> None:
    item = {"role": "user", "content": "hi"}
    assert messages([item | {"type": None}]) == messages([item])


def test_instructions_and_leading_system_messages_become_one() -> None:
    items = [
        message_item("developer", "a"),
        {"role": "system", "content": "b"},
        message_item("user", "hi"),
    ]
    converted = messages(items, instructions="Be brief.")
    assert [message["role"] for message in converted] == ["system", "user"]
    assert converted[0]["content"] == "Be brief.\n\na\n\nb"


def test_items_of_the_model_become_one_message_until_the_order_restarts() -> None:
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    items = [
        message_item("user", "hi"),
        thought,
        message_item("assistant", "Let me ", "see."),
        CALL,
        RESULT,
    ]
    converted = messages(
        [*items, thought | {"id": "rs_1"}, CALL | {"call_id": "c2"}, message_item("user", "so?")]
    )
    roles = [message["role"] for message in converted]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    function = {"name": "look", "arguments": '{"at":"sky"}'}
    assert converted[1] == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "function": function}],
    }
    blue = [{"type": "text", "text": "blue"}]
    assert converted[2] == {"role": "tool", "tool_call_id": "c1", "content": blue}
    assert converted[3]["tool_calls"][0]["id"] == "c2"
    twice = messages(
        [message_item("user", "hi"), message_item("assistant", "a"), message_item("assistant", "b")]
    )
    assert [message.get("content") for message in twice[1:]] == ["a", "b"]


def test_reasoning_is_its_content_else_its_summary_else_nothing() -> None:
    summary = [{"type": "summary_text", "text": "in short"}]
    for fields, shown in (
        ({"summary": summary}, "in short"),
        ({"summary": summary, "content": [{"type": "reasoning_text", "text": "long"}]}, "long"),
    ):
        assert (
            messages([{"type": "reasoning", **fields}, message_item("user", "hi")])[0][
                "reasoning_content"
            ]
            == shown
        )
    ours = {"type": "reasoning", "summary": [], "encrypted_content": "reasoning:I count."}
    assert messages([ours])[0]["reasoning_content"] == "I count."
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert [m["role"] for m in messages([sealed, message_item("user", "hi")])] == ["user"]


def test_earlier_items_come_before_the_input() -> None:
    earlier = [message_item("user", "one"), message_item("assistant", "two")]
    converted = translated("three", earlier=earlier, instructions="Be brief.")
    roles = [message.role for message in converted.chat.messages]
    assert roles == ["system", "user", "assistant", "user"]
    param = "messages[1].content[0]"
    assert placed(ApiError(400, "", param=param), converted.places).param == "previous_response_id"
    assert placed(ApiError(400, "", param="messages[3]"), converted.places).param == "input[0]"


def test_tools_with_the_same_name_are_refused() -> None:
    with pytest.raises(ApiError) as caught:
        translated(tools=[LOOK, LOOK | {"name": "run"}, LOOK])
    assert (caught.value.status, caught.value.param) == (400, "tools[2].name")
    assert caught.value.message.startswith("tools[2].name is 'look'")


def test_images_and_their_positions() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,QUJD", "detail": "low"}
    converted = translated(
        [{"role": "user", "content": [{"type": "input_text", "text": "see"}, image]}]
    )
    part = converted.chat.model_dump()["messages"][0]["content"][1]
    assert part["image_url"] == "data:image/png;base64,QUJD"
    error = placed(ApiError(400, "bad", param="messages[0].content[1].image_url"), converted.places)
    assert error.param == "input[0].content[1]"
    converted = translated([message_item("user", "hi"), CALL, RESULT | {"output": [image]}])
    result = converted.chat.messages[2]
    assert (result.role, result.tool_call_id) == ("tool", "c1")
    assert isinstance(result.content, list)
    assert [part.type for part in result.content] == ["image_url"]
    error = placed(ApiError(400, "bad", param="messages[2].content[0].image_url"), converted.places)
    assert error.param == "input[2].output[0]"


@pytest.mark.parametrize("kind", ["input_image", "image_url"])
def test_an_image_may_be_in_the_form_of_chats(kind: str, strict: Exchange) -> None:
    url = "data:image/png;base64,QUJD"
    for given in (url, {"url": url}):
        part = {"type": kind, "image_url": given}
        converted = translated([{"role": "user", "content": [part]}])
        contents = converted.chat.messages[0].content
        assert isinstance(contents, list)
        (content,) = contents
        assert isinstance(content, ContentPart)
        assert (content.type, content.url) == ("image_url", url)


def test_reasoning_may_be_plain_text(strict: Exchange) -> None:
    item = {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "hm"}]}
    answer = message_item("assistant", "a")
    converted = messages([message_item("user", "hi"), item, answer, message_item("user", "so?")])
    assert converted[1]["reasoning_content"] == "hm"


def test_only_a_continued_response_needs_no_input() -> None:
    earlier = [{"type": "message", "role": "user", "content": "hi"}]
    absent: tuple[dict[str, Any], ...] = ({}, {"input": None}, {"input": []})
    for none in absent:
        body = {"model": "m", "previous_response_id": "resp_x", **none}
        request = ResponsesRequest.model_validate(body)
        assert request.input == []
        chat = chat_request(request, [], ITEMS.validate_python(earlier)).chat
        assert [message.role for message in chat.messages] == ["user"]
        with pytest.raises(ApiError, match="input is missing or empty") as caught:
            ResponsesRequest.model_validate({"model": "m", **none})
        assert (caught.value.status, caught.value.param) == (400, "input")


def test_a_format_needs_no_name() -> None:
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    form = translated(text={"format": schema}).chat.response_format
    assert form is not None
    assert form.json_schema is not None
    assert form.json_schema.schema_ == {"type": "object"}


def test_tools_sampling_and_form() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    converted = translated(
        tools=[LOOK | {"strict": True, "description": "Look."}],
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "look"}],
        },
        parallel_tool_calls=False,
        text={"format": schema},
        reasoning={"effort": "high", "summary": "auto"},
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=4,
        top_logprobs=2,
    ).chat
    assert converted.tools is not None
    assert (converted.tools[0].function.strict, converted.tools[0].function.description) == (
        True,
        "Look.",
    )
    choice = converted.tool_choice
    assert not isinstance(choice, str)
    assert choice is not None
    assert choice.allowed_tools is not None
    (allowed,) = choice.allowed_tools.tools
    assert allowed.function is not None
    assert allowed.function.name == "look"
    assert converted.parallel_tool_calls is False
    assert converted.response_format is not None
    assert converted.response_format.json_schema is not None
    assert converted.response_format.json_schema.schema_ == {"type": "object"}
    assert (converted.reasoning_effort, converted.max_tokens, converted.seed) == ("high", 9, 4)
    assert (converted.temperature, converted.top_p) == (0.5, 0.9)
    assert (converted.logprobs, converted.top_logprobs) == (True, 2)


@pytest.mark.parametrize(
    ("fields", "place", "says"),
    [
        ({"input": [{"type": "item_reference"}]}, ("input", 0, "id"), "required"),
        ({"input": [{"type": "web_search_call"}]}, ("input", 0, "type"), "web_search_call"),
        ({"input": [{"role": "tool", "content": "a"}]}, ("input", 0, "role"), "user"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]},
            ("input", 0, "content", 0, "type"),
            "input_file",
        ),
        ({"tools": [{"type": "file_search"}]}, ("tools", 0, "type"), "file_search"),
        ({"tools": [{"type": "custom", "nam": "a"}]}, ("tools", 0, "name"), "required"),
        ({"tool_choice": "maybe"}, ("tool_choice",), "maybe"),
        ({"tool_choice": {"type": "web_search"}}, ("tool_choice", "type"), "web_search"),
        ({"text": {"format": {"type": "xml"}}}, ("text", "format", "type"), "xml"),
        ({"truncation": "auto"}, ("truncation",), "disabled"),
        ({"background": True}, ("background",), "Extra"),
        ({"include": ["file_search_call.results"]}, ("include", 0), "message.output_text"),
        ({"metadata": {"k": "v" * 513}}, ("metadata", "k"), "512"),
        ({"foo": 1}, ("foo",), "Extra"),
    ],
)
def test_errors_name_a_path_of_the_body(
    fields: Json, place: tuple[str | int, ...], says: str, strict: Exchange
) -> None:
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate({"model": "m", "input": "hi"} | fields)
    first = caught.value.errors()[0]
    assert first["loc"] == place
    assert says in first["msg"]


def test_values_that_ask_for_nothing_pass(strict: Exchange) -> None:
    ResponsesRequest.model_validate(
        {
            "model": "m",
            "input": "hi",
            "truncation": "disabled",
            "background": False,
            "conversation": None,
            "service_tier": "auto",
            "include": ["reasoning.encrypted_content"],
            "stream_options": {"include_obfuscation": False},
            "user": "me",
        }
    )


def test_tools_in_a_namespace_are_offered_under_one_name() -> None:
    inner = {"type": "function", "name": "read", "parameters": {"type": "object"}}
    spaces = [{"type": "namespace", "name": name, "tools": [inner]} for name in ("a", "b__")]
    call = {
        "type": "function_call",
        "call_id": "c1",
        "namespace": "a",
        "name": "read",
        "arguments": "{}",
    }
    converted = translated([message_item("user", "hi"), call], tools=[inner, *spaces])
    assert [tool.function.name for tool in converted.chat.tools or ()] == [
        "read",
        "a__read",
        "b__read",
    ]
    assert converted.chat.messages[1].tool_calls is not None
    assert converted.chat.messages[1].tool_calls[0].function.name == "a__read"
    error = placed(ApiError(400, "bad", param="tools[1].function.name"), converted.places)
    assert error.param == "tools[1].tools[0].name"


def test_tools_among_the_items_are_offered_once(strict: Exchange) -> None:
    other = LOOK | {"name": "other"}
    inside = {"type": "namespace", "name": "mcp", "tools": [LOOK]}
    added = {"type": "additional_tools", "role": "developer", "tools": [LOOK, other, inside]}
    converted = translated([added, message_item("user", "hi")], tools=[LOOK], tool_choice="auto")
    names = [tool.function.name for tool in converted.chat.tools or []]
    assert names == ["look", "other", "mcp__look"]
    assert [message.role for message in converted.chat.messages] == ["user"]
    assert converted.chat.tool_choice == "auto"
    earlier = translated("hi", earlier=[added | {"id": "at_1"}])
    assert [tool.function.name for tool in earlier.chat.tools or []] == names


def test_an_error_in_a_tool_among_the_items_names_its_path() -> None:
    added = {"type": "additional_tools", "tools": [{"type": "custom"}]}
    with pytest.raises(ValidationError) as raised:
        translated([added, message_item("user", "hi")])
    assert raised.value.errors()[0]["loc"] == ("input", 0, "tools", 0, "name")


def test_a_summary_by_this_gateway_is_a_users_message(strict: Exchange) -> None:
    sealed = {"type": "compaction", "id": "cmp_1", "encrypted_content": "reasoning:Ida asked."}
    converted = messages([sealed, message_item("user", "And?")])
    assert converted[0]["role"] == "user"
    assert str(converted[0]["content"]).endswith("\n\nIda asked.")


def test_the_first_tool_of_a_namespace_has_its_description() -> None:
    inner = [{"type": "function", "name": "read", "description": "Read."}, LOOK]
    space = {"type": "namespace", "name": "a", "description": "Files.", "tools": inner}
    read, look = translated(tools=[space]).chat.tools or []
    assert read.function.description == "Files.\n\nRead."
    assert look.function.description is None


SHELL = {"action": {"type": "exec", "command": ["ls"]}}
PATCH = {"operation": {"type": "delete_file", "path": "a"}}
SCREEN = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA=="}


@pytest.mark.parametrize(
    ("items", "name", "arguments", "result"),
    [
        (
            [
                {"type": "local_shell_call", "id": "l1", "call_id": "c1", **SHELL},
                {"type": "local_shell_call_output", "id": "c1", "output": "a b"},
            ],
            "local_shell",
            SHELL,
            "a b",
        ),
        (
            [
                {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a\nb"}]},
            ],
            "shell",
            {"action": {"commands": ["ls"]}},
            '[{"stdout":"a\\nb"}]',
        ),
        (
            [
                {"type": "apply_patch_call", "call_id": "c1", **PATCH},
                {"type": "apply_patch_call_output", "call_id": "c1", "status": "failed"},
            ],
            "apply_patch",
            PATCH,
            "failed",
        ),
        (
            [
                {
                    "type": "mcp_call",
                    "id": "c1",
                    "server_label": "s",
                    "name": "find",
                    "arguments": '{"q":"⛵"}',
                    "output": "found",
                    "error": None,
                }
            ],
            "find",
            {"q": "⛵"},
            "found",
        ),
        (
            [{"type": "mcp_call", "id": "c1", "name": "find", "arguments": "{}", "error": "no"}],
            "find",
            {},
            "no",
        ),
        (
            [{"type": "code_interpreter_call", "id": "c1", "code": "1", "outputs": [{"logs": 1}]}],
            "code_interpreter",
            {"code": "1"},
            '[{"logs":1}]',
        ),
        (
            [
                {
                    "type": "file_search_call",
                    "id": "c1",
                    "queries": ["q"],
                    "results": [{"text": "a"}],
                }
            ],
            "file_search",
            {"queries": ["q"]},
            '[{"text":"a"}]',
        ),
    ],
)
def test_a_call_that_ran_elsewhere_is_shown_as_a_call_with_its_result(
    items: list[Json], name: str, arguments: Json, result: str
) -> None:
    _, called, shown = translated([message_item("user", "hi"), *items]).chat.messages
    (call,) = called.tool_calls or []
    assert (call.id, call.function.name) == ("c1", name)
    assert json.loads(str(call.function.arguments)) == arguments
    assert (shown.role, shown.tool_call_id) == ("tool", "c1")
    dumped = shown.model_dump(exclude_none=True)
    assert dumped["content"] == [{"type": "text", "text": result}]


def test_a_screenshot_is_an_image_in_the_result() -> None:
    look = {"type": "computer_call", "call_id": "c1", "action": {"type": "screenshot"}}
    shown = {"type": "computer_call_output", "call_id": "c1", "output": SCREEN}
    *_, result = translated([message_item("user", "hi"), look, shown]).chat.messages
    (part,) = result.model_dump(exclude_none=True)["content"]
    assert part == {"type": "image_url", "image_url": SCREEN["image_url"]}


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "input_text", "text": "more"}, "more"),
        ({"type": "agent_message", "content": [{"type": "text", "text": "more"}]}, "more"),
        ({"type": "web_search_call", "id": "w", "action": {"query": "q"}}, None),
        ({"type": "image_generation_call", "id": "i", "result": "AAAA"}, None),
        ({"type": "mcp_list_tools", "id": "m", "tools": [{"name": "a"}]}, None),
        ({"type": "compaction", "id": "c", "encrypted_content": "e"}, None),
        ({"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "e"}, None),
    ],
)
def test_an_item_that_is_unknown_or_sealed_is_a_message_if_it_has_text(
    item: Json, text: str | None
) -> None:
    running = begun()
    added = translated([message_item("user", "hi"), item]).chat.messages[1:]
    texts = [each.model_dump(exclude_none=True)["content"] for each in added]
    assert texts == ([[{"type": "text", "text": text}]] if text else [])
    assert f"input[][{item['type']}]" in running.ignored


def test_an_item_with_a_list_for_a_type_is_dropped() -> None:
    running = begun()
    converted = translated([message_item("user", "hi"), {"type": ["message"], "id": "l"}])
    assert len(converted.chat.messages) == 1
    assert running.ignored


def test_a_custom_tool_is_a_function_with_one_text_argument() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tool = {"type": "custom", "name": "patch", "description": "Edit.", "format": grammar}
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "a\n"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}
    converted = translated([message_item("user", "hi"), call, result], tools=[tool]).chat
    assert converted.tools is not None
    function = converted.tools[0].function
    assert function.parameters is not None
    assert list(function.parameters["properties"]) == ["input"]
    assert "start: /x/" in (function.description or "")
    made, came = converted.messages[1:]
    assert made.tool_calls is not None
    assert made.tool_calls[0].function.arguments == json.dumps({"input": "a\n"})
    assert (came.role, came.tool_call_id) == ("tool", "c1")
    assert came.model_dump(exclude_none=True)["content"] == [{"type": "text", "text": "ok"}]
