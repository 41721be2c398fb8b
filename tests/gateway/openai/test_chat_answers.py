"""Chats from end to end: a real gateway, a real backend, a real model."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.gateway.asking import (
    ADDITION,
    COUNTING,
    VOCABULARY,
    WEATHER,
    chat,
    chat_chunks,
    joined,
    message,
    refusal,
    user_message,
)
from tests.gateway.gateway_process import GatewayProcess

PARIS = user_message("What is the weather in Paris?")


def test_an_answer_has_every_field_of_openais(gateway: GatewayProcess) -> None:
    whole = chat(gateway, model="gpt-4o-mini")
    assert whole["object"] == "chat.completion"
    assert whole["model"] == "gpt-4o-mini"
    assert whole["system_fingerprint"].startswith("fp_")
    assert whole["id"].startswith("chatcmpl-")
    (choice,) = whole["choices"]
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "7 + 5 = 12",
            "refusal": None,
            "annotations": [],
            "reasoning_content": "I have to find 7 plus 5. 7 + 5 = 12.",
        },
        "logprobs": None,
        "finish_reason": "stop",
    }
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < thought < usage["completion_tokens"]


def test_the_only_model_need_not_be_named(gateway: GatewayProcess) -> None:
    """mlx_lm.server and llama.cpp's server do not require a name, and their users send none."""
    for body in (
        {"messages": user_message(ADDITION)},
        {"messages": user_message(ADDITION), "model": None},
    ):
        answer = gateway.client.post("/v1/chat/completions", json={**body, "temperature": 0})
        whole = answer.json()
        assert (whole["model"], whole["choices"][0]["message"]["content"]) == ("tiny", "7 + 5 = 12")
    response = gateway.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()
    assert response["model"] == "tiny"


def test_a_prompt_that_was_prefilled_before_is_reported_as_cached(gateway: GatewayProcess) -> None:
    asked: dict[str, Any] = {
        "messages": user_message("Name the capital of Italy, and say it twice.")
    }
    chat(gateway, **asked)
    again = chat(gateway, **asked)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


@pytest.mark.parametrize("seed", [3, 4])
def test_a_stream_adds_up_to_the_unary_answer(gateway: GatewayProcess, seed: int) -> None:
    asked: dict[str, Any] = {"temperature": 1.5, "seed": seed, "max_tokens": 40}
    whole = chat(gateway, **asked)
    parts = chat_chunks(gateway, **asked)
    stream = joined(parts)
    assert stream["content"] == (whole["choices"][0]["message"]["content"] or "")
    assert stream["reasoning_content"] == whole["choices"][0]["message"].get(
        "reasoning_content", ""
    )
    assert stream["finish"] == [whole["choices"][0]["finish_reason"]]
    assert all("usage" not in chunk for chunk in parts)


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(gateway: GatewayProcess) -> None:
    parts = chat_chunks(gateway, n=2, stream_options={"include_usage": True})
    for index in range(2):
        own = [c for chunk in parts for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in choice["delta"] for choice in own) == 1
        assert own[-1]["delta"] == {}
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert joined(parts, index)["content"] == "7 + 5 = 12"
    assert parts[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in parts[:-1])
    usage = parts[-1]["usage"]
    assert usage == {**chat(gateway, n=2)["usage"], **_cached(usage)}
    assert (
        len({(chunk["id"], chunk["created"], chunk["system_fingerprint"]) for chunk in parts}) == 1
    )


def _cached(usage: dict[str, Any]) -> dict[str, Any]:
    """The part of the usage that depends on earlier requests."""
    return {"prompt_tokens_details": usage["prompt_tokens_details"]}


def test_every_choice_has_its_own_seed(gateway: GatewayProcess) -> None:
    asked: dict[str, Any] = {"temperature": 2, "max_tokens": 16}
    four = [choice["message"] for choice in chat(gateway, n=4, seed=11, **asked)["choices"]]
    assert len(set(map(str, four))) > 1
    assert [message(gateway, seed=11 + index, **asked) for index in range(4)] == four


def test_a_tool_is_called_and_its_result_is_used(gateway: GatewayProcess) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "messages": PARIS}
    (choice,) = chat(gateway, **asked)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "sunny"}'}
    worded = message(gateway, tools=[WEATHER], messages=[*PARIS, choice["message"], result])
    assert "tool_calls" not in worded
    assert "Paris" in worded["content"]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_call_can_be_required(gateway: GatewayProcess, choice: Any) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 200}
    answer = joined(chat_chunks(gateway, **asked))
    assert answer["finish"] == ["tool_calls"]
    (call,) = answer["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert isinstance(json.loads(call["function"]["arguments"])["city"], str)


def test_tool_choice_none_hides_the_tools(gateway: GatewayProcess) -> None:
    hidden = chat(gateway, tools=[WEATHER], tool_choice="none", messages=PARIS)
    without = chat(gateway, messages=PARIS)
    assert hidden["choices"] == without["choices"]
    assert hidden["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]


def test_allowed_tools_narrow_the_choice(gateway: GatewayProcess) -> None:
    other = {"type": "function", "function": {"name": "get_time"}}
    narrowed = chat(
        gateway,
        tools=[WEATHER, other],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "get_weather"}}],
            },
        },
        messages=PARIS,
    )
    alone = chat(gateway, tools=[WEATHER], tool_choice="required", messages=PARIS)
    assert narrowed["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert narrowed["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


TWO_CITIES = user_message("What is the weather in Paris and in Rome?")


def test_without_parallel_calls_an_answer_ends_after_the_first(gateway: GatewayProcess) -> None:
    both = message(gateway, tools=[WEATHER], messages=TWO_CITIES)["tool_calls"]
    assert len(both) == 2
    asked: dict[str, Any] = {
        "tools": [WEATHER],
        "messages": TWO_CITIES,
        "parallel_tool_calls": False,
    }
    (choice,) = chat(gateway, **asked)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [both[0]["function"]]
    answer = joined(chat_chunks(gateway, **asked))
    assert [call["function"] for call in answer["tool_calls"]] == [both[0]["function"]]


def test_legacy_functions_are_answered_in_their_own_format(gateway: GatewayProcess) -> None:
    asked: dict[str, Any] = {"functions": [WEATHER["function"]], "messages": PARIS}
    (choice,) = chat(gateway, **asked)["choices"]
    assert choice["finish_reason"] == "function_call"
    call = choice["message"]["function_call"]
    assert call == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    deltas = [c["delta"] for chunk in chat_chunks(gateway, **asked) for c in chunk["choices"]]
    parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert [part["name"] for part in parts if "name" in part] == ["get_weather"]
    assert "".join(part["arguments"] for part in parts) == call["arguments"]
    # The legacy conversation renders like the current one.
    legacy = [
        *PARIS,
        choice["message"],
        {"role": "function", "name": "get_weather", "content": "x"},
    ]
    modern_call = {"id": "1", "type": "function", "function": call}
    modern = [
        *PARIS,
        {"role": "assistant", "tool_calls": [modern_call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    assert message(gateway, messages=legacy) == message(gateway, messages=modern)


AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": AGE}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": AGE}}},
        {"response_format": {"type": "json_schema", "schema": AGE}},
        {"response_format": {"type": "json_object", "schema": AGE}},
        {"response_format": {"type": "json_object", "schema": json.dumps(AGE)}},
        {"json_schema": AGE},
        {"guided_json": json.dumps(AGE)},
        {"structured_outputs": {"json": AGE}},
    ],
    ids=lambda fields: ".".join(fields),
)
def test_an_answer_satisfies_its_schema(gateway: GatewayProcess, fields: dict[str, Any]) -> None:
    answer = message(gateway, **fields)
    assert isinstance(json.loads(answer["content"])["age"], int)
    assert answer == message(gateway, json_schema=AGE)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_choice": ['"no"\n', "nö\\"]}, {'"no"\n', "nö\\"}),
        ({"structured_outputs": {"choice": ["aye"]}}, {"aye"}),
        ({"guided_regex": "[xy]"}, {"x", "y"}),
        ({"structured_outputs": {"regex": "[xy]"}}, {"x", "y"}),
        ({"regex": "[xy]"}, {"x", "y"}),
        ({"ebnf": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"guided_grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"guided_grammar": 'start: "x" | "y"'}, {"x", "y"}),
    ],
)
def test_an_answer_matches_its_grammar(
    gateway: GatewayProcess, fields: dict[str, Any], allowed: set[str]
) -> None:
    assert message(gateway, **fields)["content"] in allowed


def test_a_response_format_applies_to_text_and_tools_may_be_called_instead(
    gateway: GatewayProcess,
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": AGE}}
    both: dict[str, Any] = {"tools": [WEATHER], "response_format": form}
    (choice,) = chat(gateway, messages=PARIS, **both)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    (choice,) = chat(gateway, **both)["choices"]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"])["age"], int)
    answer = message(gateway, tool_choice="required", **both)
    assert answer["tool_calls"][0]["function"]["name"] == "get_weather"
    answer = message(gateway, tool_choice="none", messages=PARIS, **both)
    assert isinstance(json.loads(answer["content"])["age"], int)


def test_json_object_is_an_object(gateway: GatewayProcess) -> None:
    bias = {str(VOCABULARY["}"]): 100}
    form = {"type": "json_object"}
    answer = message(gateway, response_format=form, logit_bias=bias, enable_thinking=False)
    assert json.loads(answer["content"]) == {}


def test_every_token_has_logprobs_whole_and_streamed(gateway: GatewayProcess) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "enable_thinking": False}
    whole = chat(gateway, **asked)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert whole["choices"][0]["logprobs"]["refusal"] is None
    assert len(entries) == whole["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in entries) == "7 + 5 = 12"
    for entry in entries:
        assert set(entry) == {"token", "bytes", "logprob", "top_logprobs"}
        assert [set(top) for top in entry["top_logprobs"]] == [{"token", "bytes", "logprob"}] * 2
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0  # greedy
    pieces = chat_chunks(gateway, **asked)
    parts = [c["logprobs"] for chunk in pieces for c in chunk["choices"] if c["logprobs"]]
    streamed = [entry for part in parts for entry in part["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]


@pytest.mark.parametrize(
    ("fields", "alternatives"),
    [({"logprobs": 3}, 3), ({"n_probs": 2}, 2), ({"logprobs": True}, 0), ({"logprobs": 0}, None)],
)
def test_logprobs_of_local_servers_are_the_number_of_alternatives(
    gateway: GatewayProcess, fields: dict[str, Any], alternatives: int | None
) -> None:
    answer = chat(gateway, max_tokens=2, **fields)["choices"][0]["logprobs"]
    if alternatives is None:
        assert answer is None
    else:
        assert [len(entry["top_logprobs"]) for entry in answer["content"]] == [alternatives] * 2


def test_reasoning_can_be_hidden_or_turned_off(gateway: GatewayProcess) -> None:
    silent = chat(gateway, include_reasoning=False)
    assert "reasoning_content" not in silent["choices"][0]["message"]
    assert silent["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    parts = chat_chunks(gateway, include_reasoning=False)
    assert joined(parts)["reasoning_content"] == ""
    assert joined(parts)["content"] == "7 + 5 = 12"
    for stream in (False, True):
        told_anyway = refusal(gateway, include_reasoning=False, logprobs=True, stream=stream)
        assert told_anyway["param"] == "include_reasoning"
    for off in (
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        quick = chat(gateway, **off)
        assert quick["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
        assert quick["choices"][0]["message"]["content"] == "7 + 5 = 12"


def test_all_forms_of_a_message_render_alike(gateway: GatewayProcess) -> None:
    plain = [{"role": "system", "content": "Be brief."}, *user_message(ADDITION)]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is "},
                {"type": "text", "text": "7 plus 5?"},
            ],
        },
    ]
    asked = chat(gateway, messages=plain)
    again = chat(gateway, messages=parts)
    assert again["choices"] == asked["choices"]
    assert again["usage"]["prompt_tokens"] == asked["usage"]["prompt_tokens"]


def test_role_mapping_builds_the_prompt(gateway: GatewayProcess) -> None:
    mapping = {
        "user": "<|im_start|>user\n",
        "stop": "<|im_end|>\n",
        "assistant": "<|im_start|>assistant",
    }
    answer = message(gateway, messages=user_message("Hello"), role_mapping=mapping)
    assert answer["content"].strip() == message(gateway, messages=user_message("Hello"))["content"]


def test_the_backends_refusals_use_the_clients_field_names(gateway: GatewayProcess) -> None:
    unknown = refusal(gateway, logit_bias={"99999": 1})
    assert unknown["param"] == "logit_bias"
    assert unknown["message"].startswith("logit_bias names the token 99999")
    schema = {"type": "object", "not": {}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    error = refusal(gateway, response_format=form)
    assert error["param"] == "response_format.json_schema.schema"
    assert refusal(gateway, grammar="root ::= other")["param"] == "grammar"
    empty = refusal(gateway, role_mapping={"stop": "\n"}, messages=user_message(" "))
    assert empty["param"] == "messages"
    assert "Prompt" not in empty["message"]
    long = refusal(gateway, messages=user_message("word " * 4000))
    assert (long["param"], long["code"]) == ("messages", "context_length_exceeded")
    png = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(16)).decode()
    for data in (png, "AAAA"):
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        for stream in (False, True):
            media = refusal(
                gateway, messages=[{"role": "user", "content": [picture]}], stream=stream
            )
            assert media["param"] == "messages[0].content[0].image_url"
            assert "messages[0].content[0].image_url" in media["message"]


def test_a_model_that_does_not_exist_is_a_404(gateway: GatewayProcess) -> None:
    for stream in (False, True):
        answer = gateway.client.post(
            "/chat/completions",
            json={"model": "no", "messages": user_message("x"), "stream": stream},
        )
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


def test_a_truncated_story_is_reported_as_truncated(gateway: GatewayProcess) -> None:
    (choice,) = chat(gateway, messages=user_message(COUNTING), max_tokens=5)["choices"]
    assert choice["finish_reason"] == "length"
    (choice,) = chat(gateway, messages=user_message(COUNTING), stop=[" 4"])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("1 2 3", "stop")
