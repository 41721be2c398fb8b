"""Anthropic's SDK on `/v1/messages`."""

from __future__ import annotations

from tests.clients.environments import python_program
from tests.gateway.gateway_process import GatewayProcess


def test_messages(gateway: GatewayProcess) -> None:
    results = python_program("anthropic_sdk", gateway.url)
    assert results["text"] == results["streamed"] == "1 2 3 4 5"
    assert results["stop"] == results["stream_stop"] == "end_turn"
    assert results["call"] == ["tool_use", "get_weather", {"city": "Paris"}]
    assert "Paris" in results["after_tool"]
    assert results["cut"] == "max_tokens"
    assert results["stop_sequence"] == ["stop_sequence", "5"]
    assert results["tokens"] > 5
    assert results["gone_on"] == " 3 4 5"
    assert ["tiny", "model", "tiny", True] in results["models"]
    assert results["unknown_model"] == "not_found_error"
    assert results["runner"] == results["streamed_runner"] == "It is 18 degrees in Paris."
    assert results["thread"] == "ThreadUnsupportedRequestError"
