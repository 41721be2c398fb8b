"""Calls cut anywhere by a limit or a stop: partial in a stream, dropped from a whole answer."""

from __future__ import annotations

import json

import pytest

from tests.gateway.anthropic.test_messages import WEATHER as OWN_WEATHER
from tests.gateway.anthropic.test_messages import body_of, streamed, whole
from tests.gateway.asking import VOCABULARY, WEATHER, chat, chat_chunks, joined, user_message
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.responses.test_responses import WEATHER as FLAT_WEATHER
from tests.gateway.responses.test_responses import streamed as response_events
from tests.gateway.responses.test_responses import whole as whole_response

QUESTION = "What is the weather in Paris?"
LIMITS = range(1, 27)  # the largest limits cut nothing


@pytest.mark.parametrize("limit", LIMITS)
def test_a_chat(gateway: GatewayProcess, limit: int) -> None:
    asked = {"messages": user_message(QUESTION), "tools": [WEATHER], "max_tokens": limit}
    (choice,) = chat(gateway, **asked)["choices"]
    called = bool(choice["message"].get("tool_calls"))
    if choice["finish_reason"] == "length":
        for call in choice["message"].get("tool_calls", []):
            assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    else:
        assert (choice["finish_reason"], called) == ("tool_calls", True)
    assert not choice["message"]["content"]
    answer = joined(chat_chunks(gateway, **asked))
    assert answer["content"] == ""
    assert answer["finish"] == [choice["finish_reason"]]
    assert called or limit < LIMITS[-1]


STOPS: list[dict[str, list[str] | list[int]]] = [
    {"stop": [text]} for text in ("Par", '"}', '"arg', "name", "weather")
]
STOPS += [{"stop_token_ids": [VOCABULARY[token]]} for token in ("ar", "city", "is", "arguments")]


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_a_stop(gateway: GatewayProcess, stop: dict[str, list[str] | list[int]]) -> None:
    """A stop string or token within a call neither shows markup nor completes the call."""
    asked = {"messages": user_message(QUESTION), "tools": [WEATHER], **stop}
    (choice,) = chat(gateway, **asked)["choices"]
    assert choice["finish_reason"] == "stop"
    assert not choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    answer = joined(chat_chunks(gateway, **asked))
    assert (answer["content"], answer["finish"]) == ("", ["stop"])


def test_a_stop_in_a_response(gateway: GatewayProcess) -> None:
    """The item of the call is incomplete in a stream, and not in the whole response."""
    asked = {"tools": [FLAT_WEATHER], "stop": ["Par"]}
    assert whole_response(gateway, QUESTION, **asked)["output"] == []
    last = response_events(gateway, QUESTION, **asked)[-1]["response"]
    assert [(item["type"], item["status"]) for item in last["output"]] == [
        ("function_call", "incomplete")
    ]
    assert gateway.client.get(f"/v1/responses/{last['id']}").json()["output"] == []


def test_a_stop_at_the_end_of_a_call(gateway: GatewayProcess) -> None:
    """The family's own closing marker ends a call even as a stop string."""
    asked = {"messages": user_message(QUESTION), "tools": [WEATHER], "stop": ["</tool_call>"]}
    (choice,) = chat(gateway, **asked)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert joined(chat_chunks(gateway, **asked))["finish"] == ["tool_calls"]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_message(gateway: GatewayProcess, limit: int) -> None:
    body = body_of(QUESTION, tools=[OWN_WEATHER], max_tokens=limit)
    answer = whole(gateway, body)
    events = streamed(gateway, body)
    (end,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert end["stop_reason"] == answer["stop_reason"]
    assert answer["stop_reason"] in ("max_tokens", "tool_use")
    assert all(block["type"] == "tool_use" for block in begun)
    for block in answer["content"]:
        assert (block["type"], block["input"]) == ("tool_use", {"city": "Paris"})
    assert bool(answer["content"]) >= (answer["stop_reason"] == "tool_use")
    assert answer["content"] or limit < LIMITS[-1]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_response(gateway: GatewayProcess, limit: int) -> None:
    asked = {"tools": [FLAT_WEATHER], "max_output_tokens": limit}
    answer = whole_response(gateway, QUESTION, **asked)
    events = response_events(gateway, QUESTION, **asked)
    assert answer["status"] == events[-1]["response"]["status"]
    if answer["status"] == "incomplete":
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    for item in answer["output"]:
        assert (item["type"], item["status"]) == ("function_call", "completed")
        assert json.loads(item["arguments"]) == {"city": "Paris"}
    shown = events[-1]["response"]["output"]
    assert all(item["type"] == "function_call" for item in shown)
    assert len([item for item in shown if item["status"] == "completed"]) == len(answer["output"])
    # What a client can retrieve and continue is the whole answer.
    last = events[-1]["response"]
    kept = gateway.client.get(f"/v1/responses/{last['id']}").json()
    assert [item for item in shown if item["status"] == "completed"] == kept["output"]
    assert answer["output"] or limit < LIMITS[-1]
    whole_response(gateway, "Count to 3.", previous_response_id=last["id"], max_output_tokens=1)
