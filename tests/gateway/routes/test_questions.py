"""An invalid request to another API than OpenAI's is refused before a model is loaded for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.gateway_process import GatewayProcess, tiny

Json = dict[str, Any]
SAID = [{"role": "user", "content": "hi"}]
MESSAGE: Json = {"model": "tiny", "max_tokens": 5, "temperature": 0, "messages": SAID}
COUNTED: Json = {"model": "tiny", "messages": SAID}
RESPONSE: Json = {"model": "tiny", "max_output_tokens": 16, "temperature": 0, "input": "hi"}
TOOL: Json = {"name": "look", "input_schema": {"type": "object"}}
FUNCTION: Json = {"type": "function", "name": "look", "parameters": {"type": "object"}}
BROKEN: Json = {"type": "base64", "media_type": "image/png", "data": "no base64"}
LOOK_AT: Json = {"role": "user", "content": [{"type": "image", "source": BROKEN}]}
SEEN: Json = {"type": "input_image", "image_url": "data:image/png;base64,no base64"}
FAR: Json = {"type": "input_image", "image_url": "https://example.com/a.png"}


# Tests of other files share a gateway that has its model loaded.
@pytest.fixture
def idle() -> Iterator[GatewayProcess]:
    process = GatewayProcess({"tiny": tiny()})
    yield process
    process.close()


def test_an_invalid_request_loads_nothing_and_keeps_its_status(idle: GatewayProcess) -> None:
    wrong: list[tuple[str, Json, str]] = [
        (
            "messages",
            MESSAGE | {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "run"}},
            "tool_choice.name",
        ),
        ("messages", MESSAGE | {"messages": [LOOK_AT]}, "messages[0].content[0]"),
        ("messages", MESSAGE | {"stop_sequences": list("abcdefghijklm") * 5}, "stop_sequences"),
        ("messages/count_tokens", COUNTED | {"messages": [LOOK_AT]}, "messages[0].content[0]"),
        (
            "responses",
            RESPONSE | {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "run"}},
            "tool_choice.name",
        ),
        (
            "responses",
            RESPONSE | {"input": [{"role": "user", "content": [SEEN]}]},
            "input[0].content[0]",
        ),
        (
            "responses",
            RESPONSE | {"input": [{"role": "user", "content": [FAR]}]},
            "input[0].content[0]",
        ),
    ]
    for path, body, place in wrong:
        streams = [{}] if path.endswith("count_tokens") else [{}, {"stream": True}]
        for way in streams:
            answer = idle.client.post(f"/v1/{path}", json=body | way)
            assert answer.status_code == 400, answer.text
            assert place in answer.text
    assert idle.backends() == []


def test_a_request_right_after_a_kill_is_repeated(gateway: GatewayProcess) -> None:
    before = gateway.client.post("/v1/messages", json=MESSAGE)
    (backend,) = gateway.backends()
    backend.kill()
    after = gateway.client.post("/v1/messages", json=MESSAGE)
    assert after.status_code == before.status_code == 200, after.text
    assert after.json()["content"] == before.json()["content"]
    assert gateway.backends() != [backend]
