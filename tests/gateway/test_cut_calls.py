"""Calls that the length limit cuts, wherever: partial in a stream, left out of a whole answer."""

from __future__ import annotations

import json

import pytest

from tests.gateway.asking import WEATHER, chat, chat_chunks, joined, said
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.test_messages import WEATHER as OWN_WEATHER
from tests.gateway.test_messages import body_of, streamed, whole

QUESTION = "What is the weather in Paris?"
LIMITS = range(1, 40, 3)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_chat(gateway: GatewayProcess, limit: int) -> None:
    asked = {"messages": said(QUESTION), "tools": [WEATHER], "max_tokens": limit}
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
