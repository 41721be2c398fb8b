"""Ignored and refused fields have the names of the API that was called.

Covers: gateway/openai/answering.py, gateway/exchange.py
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.gateway.asking import user_message
from tests.gateway.gateway_process import GatewayProcess

DATA = "iVBORw0KGgo="
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
PART = {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"}
LOOK = user_message("Look.")
LATER = [{"role": "assistant", "content": "A cat."}, *user_message("So?")]
USE = {"type": "tool_use", "id": "c1", "name": "see", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [BLOCK]}
CALL = {"type": "function_call", "call_id": "c1", "name": "see", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": [PART]}
RESPONSES = "/v1/responses"


def of_anthropic(*messages: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"max_tokens": 4, "messages": messages}


def of_ollama(*messages: Any) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {"stream": False, "options": {"num_predict": 4}, "messages": messages}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


@pytest.mark.parametrize(
    ("request_", "name", "refused"),
    [
        (
            of_anthropic(user([BLOCK]), *LATER),
            "messages[].content[][image]",
            "messages[0].content[0]",
        ),
        (
            of_anthropic(*LOOK, {"role": "assistant", "content": [USE]}, user([RESULT])),
            "messages[].content[].content[][image]",
            "messages[2].content[0].content[0]",
        ),
        (
            (RESPONSES, {"input": [user([PART]), *LATER]}),
            "input[].content[][input_image]",
            "input[0].content[0]",
        ),
        (
            (RESPONSES, {"input": [*LOOK, CALL, OUTPUT]}),
            "input[].output[][input_image]",
            "input[2].output[0]",
        ),
        (
            of_ollama(user("a", images=[DATA]), *LATER),
            "messages[].images[]",
            "messages[0].images[0]",
        ),
        (of_ollama(user("a", thinking="b")), "messages[].thinking", "messages[0].thinking"),
    ],
)
def test_parts_of_messages_have_the_names_of_the_api(
    gateway: GatewayProcess,
    strict_gateway: GatewayProcess,
    request_: tuple[str, dict[str, Any]],
    name: str,
    refused: str,
) -> None:
    path, body = request_
    answer = gateway.client.post(path, json={"model": "tiny", **body})
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, name), answer.text
    refusal = strict_gateway.client.post(path, json={"model": "tiny", **body})
    assert refusal.status_code == 400
    error = refusal.json()["error"]
    message: str = error if isinstance(error, str) else error["message"]
    assert message.split()[0] == refused


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/embeddings", "input"), ("/v1/embed", "inputs"), ("/api/embed", "input")],
)
def test_texts_to_embed_have_the_name_of_the_api(
    gateway: GatewayProcess, path: str, name: str
) -> None:
    asked = {"model": "tiny", name: "a word " * 1000, "truncate": False}
    answer = gateway.client.post(path, json=asked)
    assert answer.status_code == 400
    error = answer.json()["error"]
    message: str = error if isinstance(error, str) else error["message"]
    assert message.split()[0] == name


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"format": {"type": "nothing"}}, "format"),
        ({"options": {"stop_token_ids": [99999]}}, "options.stop_token_ids"),
        ({"options": {"min_tokens": 2, "num_predict": 1}}, "options.min_tokens"),
        ({"options": {"repeat_penalty": 2, "repetition_penalty": 3}}, "options.repeat_penalty"),
    ],
)
def test_options_of_ollama_are_named_with_and_without_a_template(
    gateway: GatewayProcess, body: dict[str, Any], name: str, raw: bool
) -> None:
    asked = {"model": "tiny", "prompt": "a", "stream": False, "raw": raw, **body}
    answer = gateway.client.post("/api/generate", json=asked)
    assert answer.status_code == 400
    assert re.split("[ :\\[]", answer.json()["error"])[0] == name
