"""Anthropic's Messages API on a real gateway with a real model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.anthropic.test_messages_answer import rebuilt
from tests.gateway.event_lines import events_of
from tests.gateway.gateway_process import GatewayProcess

Json = dict[str, Any]
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
VERDICT = {
    "type": "object",
    "properties": {"verdict": {"enum": ["yes", "no"]}},
    "required": ["verdict"],
    "additionalProperties": False,
}


def body_of(text: str, **fields: Any) -> Json:
    turns = [{"role": "user", "content": text}]
    return {"model": "tiny", "max_tokens": 200, "temperature": 0, "messages": turns, **fields}


def whole(gateway: GatewayProcess, body: Json, path: str = "/v1/messages") -> Json:
    answer = gateway.client.post(path, json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    response: Json = answer.json()
    return response


def streamed(gateway: GatewayProcess, body: Json) -> list[Json]:
    with gateway.client.stream("POST", "/v1/messages", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(events_of(answer.iter_lines()))


def plain(message: Json) -> Json:
    """The parts of an answer that are equal for equal requests: no names, no cache counts."""
    blocks = [{**block, "id": ""} for block in message["content"]]
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return message | {"id": "", "content": blocks, "usage": (prompt, usage["output_tokens"])}


def texts(message: Json) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


@pytest.mark.parametrize(
    ("text", "fields", "kinds", "reason"),
    [
        ("What is the capital of Peru?", {}, ["text"], "end_turn"),
        ("What is 7 plus 5?", {}, ["thinking", "text"], "end_turn"),
        (
            "What is the weather in Paris and Rome?",
            {"tools": [WEATHER]},
            ["tool_use", "tool_use"],
            "tool_use",
        ),
        ("Count to 20.", {"max_tokens": 5}, ["text"], "max_tokens"),
        ("Count to 20.", {"stop_sequences": ["x", "9"]}, ["text"], "stop_sequence"),
    ],
)
def test_a_stream_adds_up_to_the_whole_message(
    gateway: GatewayProcess, text: str, fields: Json, kinds: list[str], reason: str
) -> None:
    body = body_of(text, **fields)
    answer = whole(gateway, body)
    assert [block["type"] for block in answer["content"]] == kinds
    assert answer["stop_reason"] == reason
    events = streamed(gateway, body)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert plain(rebuilt(events)) == plain(answer)


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 0}])
def test_a_stream_begins_with_the_number_of_prompt_tokens(
    gateway: GatewayProcess, fields: Json
) -> None:
    events = streamed(gateway, body_of("What is the capital of Peru?") | fields)
    (end,) = [event["usage"] for event in events if event["type"] == "message_delta"]
    begun = events[0]["message"]["usage"]
    assert begun["input_tokens"] == end["input_tokens"] + end["cache_read_input_tokens"] > 0


def test_it_works_without_v1_and_with_aliases(gateway: GatewayProcess) -> None:
    answer = whole(gateway, body_of("Hello!", model="gpt-4o-mini"), "/messages")
    assert texts(answer) == "Hello! How can I help you?"
    assert answer["model"] == "gpt-4o-mini"


def test_the_only_model_need_not_be_named(gateway: GatewayProcess) -> None:
    body = body_of("Hello!")
    del body["model"]
    answer = whole(gateway, body)
    assert (answer["model"], texts(answer)) == ("tiny", "Hello! How can I help you?")
    assert whole(gateway, body | {"model": "default_model"})["content"] == answer["content"]
    counted = whole(gateway, {"messages": body["messages"]}, "/v1/messages/count_tokens")
    assert counted["input_tokens"] > 0


def test_a_begun_answer_is_continued(gateway: GatewayProcess) -> None:
    question = body_of("Count to 6.")
    turns = [*question["messages"], {"role": "assistant", "content": "1 2 3"}]
    response = whole(gateway, question | {"messages": turns})
    assert texts(response) == " 4 5 6"
    chat = {"model": question["model"], "messages": turns, "temperature": 0}
    chat |= {"continue_final_message": True, "add_generation_prompt": False}
    answer = gateway.client.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["message"]["content"] == " 4 5 6"


def test_a_stop_sequence_is_reported_and_left_out(gateway: GatewayProcess) -> None:
    answer = whole(gateway, body_of("Count to 20.", stop_sequences=["x", " 9"]))
    assert texts(answer) == "1 2 3 4 5 6 7 8"
    assert answer["stop_sequence"] == " 9"


def test_a_call_and_its_result_lead_to_an_answer(gateway: GatewayProcess) -> None:
    question = body_of("What is the weather in Oslo?", tools=[WEATHER])
    asked = whole(gateway, question)
    (call,) = [block for block in asked["content"] if block["type"] == "tool_use"]
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": '{"temperature": 21}'}
    turns = [
        *question["messages"],
        {"role": "assistant", "content": asked["content"]},
        {"role": "user", "content": [result]},
    ]
    answer = whole(gateway, question | {"messages": turns})
    assert texts(answer) == "It is 21 degrees in Oslo."
    assert answer["stop_reason"] == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_required_call_is_made(gateway: GatewayProcess, choice: Json) -> None:
    answer = whole(gateway, body_of("Hello!", tools=[WEATHER], tool_choice=choice))
    assert answer["content"][-1]["type"] == "tool_use"
    assert isinstance(answer["content"][-1]["input"]["city"], str)


def test_forbidden_tools_are_not_called(gateway: GatewayProcess) -> None:
    text = "What is the weather in Oslo?"
    answer = whole(gateway, body_of(text, tools=[WEATHER], tool_choice={"type": "none"}))
    assert {block["type"] for block in answer["content"]} <= {"text", "thinking"}


def test_thinking_can_be_off_shown_or_hidden(gateway: GatewayProcess) -> None:
    text = "What is 7 plus 5?"
    off = whole(gateway, body_of(text, thinking={"type": "disabled"}))
    assert [block["type"] for block in off["content"]] == ["text"]
    on = {"type": "enabled", "budget_tokens": 1024}
    shown = whole(gateway, body_of(text, thinking=on))
    assert "7 plus 5" in shown["content"][0]["thinking"]
    assert shown["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    hidden = whole(gateway, body_of(text, thinking=on | {"display": "omitted"}))
    assert hidden["content"][0]["thinking"] == ""
    assert texts(hidden) == texts(shown)


def test_an_answer_satisfies_its_schema(gateway: GatewayProcess) -> None:
    form = {"format": {"type": "json_schema", "schema": VERDICT}}
    fields = {"output_config": form, "thinking": {"type": "disabled"}}
    answer = whole(gateway, body_of("Is Paris in France?", **fields))
    assert json.loads(texts(answer))["verdict"] in ("yes", "no")


def test_counted_tokens_equal_those_of_the_prompt(gateway: GatewayProcess) -> None:
    body = body_of("Tell me a story about a goat.", system="Be brief.", tools=[WEATHER])
    asked = {name: body[name] for name in ("model", "messages", "system", "tools")}
    counted = whole(gateway, asked, "/v1/messages/count_tokens")
    usage = whole(gateway, body | {"max_tokens": 1})["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == {"input_tokens": prompt}


def test_a_conversation_longer_than_the_context_can_be_counted(gateway: GatewayProcess) -> None:
    """Clients count to find out whether they must shorten it."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "one two " * 1000}]}
    counted = whole(gateway, asked, "/v1/messages/count_tokens")
    assert counted["input_tokens"] > 2000
    twice = asked | {"messages": [{"role": "user", "content": "one two " * 2000}]}
    longer = whole(gateway, twice, "/v1/messages/count_tokens")
    assert longer["input_tokens"] > 2 * counted["input_tokens"] - 100


def test_a_limit_of_zero_tokens_only_caches_the_prompt(gateway: GatewayProcess) -> None:
    body = body_of("Tell me a long story about a whale.")
    warmed = whole(gateway, body | {"max_tokens": 0})
    assert (warmed["content"], warmed["usage"]["output_tokens"]) == ([], 0)
    assert warmed["stop_reason"] == "max_tokens"
    usage = whole(gateway, body | {"max_tokens": 1})["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"]


def test_the_end_of_the_context_has_its_own_stop_reason(gateway: GatewayProcess) -> None:
    answer = whole(gateway, body_of("Say tick forever.", max_tokens=100_000))
    assert answer["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("fields", "status", "kind", "says"),
    [
        ({"model": "nobody"}, 404, "not_found_error", "'nobody' does not exist"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"foo": 1}, 400, "invalid_request_error", "argument supplied: foo"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            400,
            "invalid_request_error",
            "tools[0].type: a tool of type bash_20250124",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].type: a content block of type document",
        ),
        ({"stop_sequences": [""] * 99}, 400, "invalid_request_error", "stop_sequences"),
        (
            {"messages": [{"role": "user", "content": "word " * 3000}]},
            400,
            "invalid_request_error",
            "1024",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_form(
    strict_gateway: GatewayProcess, fields: Json, status: int, kind: str, says: str, stream: bool
) -> None:
    answer = strict_gateway.client.post("/v1/messages", json=body_of("hi", stream=stream) | fields)
    assert answer.status_code == status
    response = answer.json()
    assert (response["type"], response["error"]["type"]) == ("error", kind)
    assert says in response["error"]["message"]
    assert response["request_id"] == answer.headers["request-id"]
