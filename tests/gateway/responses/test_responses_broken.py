"""Anthropic's and Responses' streams whose backend is killed, or is slow to load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gateway.event_lines import events_of
from tests.gateway.gateway_process import GatewayProcess, roomy

Json = dict[str, Any]
MESSAGE = {
    "model": "tiny",
    "max_tokens": 100_000,
    "stream": True,
    "messages": [{"role": "user", "content": "Say tick forever."}],
}
RESPONSE = {"model": "tiny", "stream": True, "input": "Say tick forever."}


def cut_off(gateway: GatewayProcess, path: str, body: Json, delta: str) -> Iterator[Json]:
    """The events of a stream whose backend is killed at the first delta."""
    with gateway.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        killed = False
        for event in events_of(answer.iter_lines()):
            yield event
            if event["type"] == delta and not killed:
                killed = True
                for backend in gateway.backends():
                    backend.kill()


def test_a_failure_is_an_error_event_and_not_an_end_event() -> None:
    gateway = GatewayProcess({"tiny": roomy()}, "--keepalive-interval", "0.05")
    try:
        parts = list(cut_off(gateway, "/v1/messages", MESSAGE, "content_block_delta"))
        kinds = [event["type"] for event in parts]
        # The stream began while the model was being loaded, before any event could be sent.
        assert kinds[:3] == ["message_start", "ping", "ping"]
        assert kinds.count("message_start") == 1
        assert "content_block_delta" in kinds
        assert "message_stop" not in kinds
        assert "message_delta" not in kinds
        assert parts[-1]["type"] == "error"
        assert parts[-1]["error"]["type"] == "overloaded_error"

        parts = list(cut_off(gateway, "/v1/responses", RESPONSE, "response.output_text.delta"))
        kinds = [event["type"] for event in parts]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds.count("response.in_progress") > 2  # its model was being loaded again
        assert [event["sequence_number"] for event in parts] == list(range(len(parts)))
        assert parts[-1]["type"] == "response.failed"
        failed = parts[-1]["response"]
        assert failed["error"]["code"] == "server_error"
        assert failed["output"][0]["status"] == "incomplete"
        kept = gateway.client.get(f"/v1/responses/{failed['id']}")
        assert kept.status_code == 404
    finally:
        gateway.close()
