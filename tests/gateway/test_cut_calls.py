"""Calls cut anywhere by the length limit: partial in a stream, dropped from a whole answer."""

from __future__ import annotations

import json

import pytest

from tests.gateway.asking import WEATHER, chat, chat_chunks, joined, user_message
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.test_messages import WEATHER as OWN_WEATHER
from tests.gateway.test_messages import body_of, streamed, whole
from tests.gateway.test_responses import WEATHER as FLAT_WEATHER
from tests.gateway.test_responses import streamed as response_events
from tests.gateway.test_responses import whole as whole_response

QUESTION = "What is the weather in Paris?"
LIMITS = range(1, 27)  # the last ones cut nothing


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
    told = joined(chat_chunks(gateway, **asked))
    assert told["content"] == ""
    assert told["finish"] == [choice["finish_reason"]]
    assert called or limit < LIMITS[-1]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_message(gateway: GatewayProcess, limit: int) -> None:
    body = body_of(QUESTION, tools=[OWN_WEATHER], max_tokens=limit)
    told = whole(gateway, body)
    events = streamed(gateway, body)
    (end,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert end["stop_reason"] == told["stop_reason"]
    assert told["stop_reason"] in ("max_tokens", "tool_use")
    assert all(block["type"] == "tool_use" for block in begun)
    for block in told["content"]:
        assert (block["type"], block["input"]) == ("tool_use", {"city": "Paris"})
    assert bool(told["content"]) >= (told["stop_reason"] == "tool_use")
    assert told["content"] or limit < LIMITS[-1]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_response(gateway: GatewayProcess, limit: int) -> None:
    asked = {"tools": [FLAT_WEATHER], "max_output_tokens": limit}
    told = whole_response(gateway, QUESTION, **asked)
    events = response_events(gateway, QUESTION, **asked)
    assert told["status"] == events[-1]["response"]["status"]
    if told["status"] == "incomplete":
        assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    for item in told["output"]:
        assert (item["type"], item["status"]) == ("function_call", "completed")
        assert json.loads(item["arguments"]) == {"city": "Paris"}
    shown = events[-1]["response"]["output"]
    assert all(item["type"] == "function_call" for item in shown)
    assert len([item for item in shown if item["status"] == "completed"]) == len(told["output"])
    # What a client can retrieve and continue is the whole answer.
    last = events[-1]["response"]
    kept = gateway.client.get(f"/v1/responses/{last['id']}").json()
    assert [item for item in shown if item["status"] == "completed"] == kept["output"]
    assert told["output"] or limit < LIMITS[-1]
    whole_response(gateway, "Count to 3.", previous_response_id=last["id"], max_output_tokens=1)
