"""Anthropic's SDK on `/v1/messages`."""

from __future__ import annotations

from tests.clients.environments import python_program
from tests.gateway.gateway_process import GatewayProcess


def test_messages(gateway: GatewayProcess) -> None:
    told = python_program("anthropic_sdk", gateway.url)
    assert told["text"] == told["streamed"] == "1 2 3 4 5"
    assert told["stop"] == told["stream_stop"] == "end_turn"
    assert told["call"] == ["tool_use", "get_weather", {"city": "Paris"}]
    assert "Paris" in told["after_tool"]
    assert told["cut"] == "max_tokens"
    assert told["stop_sequence"] == ["stop_sequence", "5"]
    assert told["tokens"] > 5
    assert told["gone_on"] == " 3 4 5"
    assert ["tiny", "model", "tiny", True] in told["models"]
    assert told["unknown_model"] == "not_found_error"
