"""The gateway as a program: its start, its first lines, and the end of its last process."""

from __future__ import annotations

from tests.gateway.gateway_process import GatewayProcess


def test_it_lists_its_models_and_ends_with_its_backends(gateway: GatewayProcess) -> None:
    response = gateway.client.get("/v1/models").json()
    assert "tiny" in {model["id"] for model in response["data"]}
    question = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "2+2"}],
        "stream": True,
        "max_tokens": 4,
    }
    with gateway.client.stream("POST", "/v1/chat/completions", json=question) as answer:
        assert list(answer.iter_lines())[-2:] == ["data: [DONE]", ""]
    assert len(gateway.backends()) == 1
