"""Values that the request types of client libraries and other servers allow."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from gateway.anthropic.request import MessagesRequest
from gateway.anthropic.request import chat_request as of_anthropic
from gateway.openai.messages import UNREAD
from gateway.responses.request import ResponsesRequest
from gateway.responses.request import chat_request as of_responses
from tests.gateway.asking import WEATHER, user_message
from tests.gateway.openai.test_attachments import sound, wire
from tests.gateway.openai.test_chat_to_wire import as_dict, completion, translated
from tests.gateway.requests_begun import begun

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(8)).decode()


@pytest.mark.parametrize("field", ["reasoning_content", "refusal", "tool_call_id"])
def test_fields_of_another_role_are_left_out(field: str) -> None:
    """Libraries with one class for all messages allow every field for every role."""
    running = begun()
    turns = [{"role": "user", "content": "x", field: "y"}]
    assert as_dict(translated({"messages": turns})[0]) == as_dict(
        translated({"messages": user_message("x")})[0]
    )
    assert [*running.ignored] == [f"messages[].{field}"]


def test_groq_requires_a_call_in_the_legacy_form() -> None:
    asked = {"functions": [WEATHER["function"]], "function_call": "required"}
    assert translated(asked)[0].ToolChoice == '"required"'


@pytest.mark.parametrize("effort", [0.5, 1, True])
def test_an_effort_in_numbers_is_left_out(effort: float) -> None:
    """SGLang's share of the whole effort, and Fireworks' tokens."""
    running = begun()
    plain = translated({"messages": user_message("x")})[0]
    asked = {"messages": user_message("x"), "reasoning_effort": effort}
    assert as_dict(translated(asked)[0]) == as_dict(plain)
    assert [*running.ignored] == ["reasoning_effort"]


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"file": {"file_data": f"data:image/png;base64,{PNG}"}}, "Images"),
        ({"file": {"filename": "a.png", "file_data": PNG}}, "Images"),
        ({"file": {"file_data": sound()}}, "Audios"),
    ],
)
def test_a_file_in_a_chat_may_be_an_image_or_a_sound(part: dict[str, Any], kind: str) -> None:
    (options,) = translated({"messages": [{"role": "user", "content": [{"type": "file", **part}]}]})
    assert len(getattr(options, kind)) == 1


def test_the_voice_of_an_answer_in_text_is_left_out() -> None:
    asked = {"modalities": ["text"], "audio": {"voice": "a", "format": "wav"}}
    assert translated({"messages": user_message("x"), **asked})[0].Messages[0].content == "x"


def test_a_result_in_responses_may_name_its_function_alone() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "name": "look", "output": "5"}
    body = ResponsesRequest.model_validate({"input": [call, result]})
    found = wire(of_responses(body, body.input)).Messages[-1]  # type: ignore[arg-type]
    assert (found.role, found.tool_call_id, found.content) == ("tool", "c", "5")


@pytest.mark.parametrize("reference", [{"id": "msg_1"}, {"id": "msg_1", "type": None}])
def test_a_reference_in_responses_needs_no_type(reference: dict[str, Any]) -> None:
    (item,) = ResponsesRequest.model_validate({"input": [reference]}).input
    assert (item.type, item.id) == ("item_reference", "msg_1")


def test_a_file_for_a_providers_container_is_described_to_the_model() -> None:
    turn = {"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}
    body = {"model": "m", "max_tokens": 1, "messages": [turn]}
    found = of_anthropic(MessagesRequest.model_validate(body))
    assert wire(found).Messages[0].content == UNREAD


@pytest.mark.parametrize("turn", [{"role": "user"}, {"role": "assistant", "content": None}])
def test_a_message_in_responses_may_be_empty(turn: dict[str, Any]) -> None:
    body = ResponsesRequest.model_validate({"input": [turn, {"role": "user", "content": "x"}]})
    found = wire(of_responses(body, body.input))  # type: ignore[arg-type]
    assert [message.content for message in found.Messages] == ["", "x"]


def test_a_search_without_results_is_left_out() -> None:
    running = begun()
    empty = {"type": "search_result", "source": "https://x.y", "title": "", "content": []}
    turn = {"role": "user", "content": [empty, {"type": "text", "text": "x"}]}
    body = {"model": "m", "max_tokens": 1, "messages": [turn]}
    found = of_anthropic(MessagesRequest.model_validate(body))
    assert wire(found).Messages[0].content == "x"
    assert [*running.ignored] == ["messages[].content[][search_result]"]


def test_a_system_message_may_consist_of_settings() -> None:
    turns = [*user_message("x"), {"role": "system", "output_config": {"effort": "low"}}]
    body = {"model": "m", "max_tokens": 1, "messages": turns}
    running = begun()
    assert len(wire(of_anthropic(MessagesRequest.model_validate(body))).Messages) == 1
    assert [*running.ignored] == ["messages[]"]


def test_mlx_lms_default_asks_for_no_log_probabilities() -> None:
    assert as_dict(completion({"logprobs": -1})[0]) == as_dict(completion({})[0])
