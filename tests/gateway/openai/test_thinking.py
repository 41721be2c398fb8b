"""How long a real model reasons, limited by a request to each of the three APIs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.asking import ADDITION, user_message
from tests.gateway.gateway_process import GatewayProcess

Json = dict[str, Any]


def _thinking_request(gateway: GatewayProcess, path: str, **fields: Any) -> Json:
    answer = gateway.client.post(path, json={"model": "tiny", "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    response: Json = answer.json()
    return response


def _chat(gateway: GatewayProcess, **fields: Any) -> tuple[str, str, int]:
    answer = _thinking_request(
        gateway, "/v1/chat/completions", messages=user_message(ADDITION), **fields
    )
    message = answer["choices"][0]["message"]
    thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return message.get("reasoning_content", ""), message["content"], thought


def _message(gateway: GatewayProcess, **fields: Any) -> tuple[str, str, int]:
    answer = _thinking_request(
        gateway, "/v1/messages", max_tokens=300, messages=user_message(ADDITION), **fields
    )
    found = {"thinking": "", "text": ""}
    for block in answer["content"]:
        found[block["type"]] += block[block["type"]]
    return *found.values(), answer["usage"]["output_tokens_details"]["thinking_tokens"]


def _response(gateway: GatewayProcess, **fields: Any) -> tuple[str, str, int]:
    answer = _thinking_request(gateway, "/v1/responses", input=ADDITION, **fields)
    found = {"reasoning": "", "message": ""}
    for item in answer["output"]:
        found[item["type"]] += "".join(part["text"] for part in item["content"])
    return *found.values(), answer["usage"]["output_tokens_details"]["reasoning_tokens"]


BUDGETS = [
    (_chat, lambda most: {"thinking_budget": most}),
    (_chat, lambda most: {"reasoning_budget": most}),
    (_chat, lambda most: {"reasoning": {"max_tokens": most}}),
    (_message, lambda most: {"thinking": {"type": "enabled", "budget_tokens": most}}),
    (_response, lambda most: {"reasoning": {"max_tokens": most}}),
]


@pytest.mark.parametrize(("ask", "fields"), BUDGETS)
def test_a_budget_ends_the_reasoning_and_an_answer_follows(
    gateway: GatewayProcess, ask: Any, fields: Any
) -> None:
    free, _, many = ask(gateway)
    reasoning, text, count = ask(gateway, **fields(4))
    assert 0 < len(reasoning) < len(free)
    assert free.startswith(reasoning)
    assert 0 < count <= 5 < many  # including the tag
    assert text
    assert "think>" not in text
    assert ask(gateway, **fields(0))[0] == ""
    assert ask(gateway, **fields(1000)) == ask(gateway)


def test_thinking_needs_a_chat_template(gateway: GatewayProcess) -> None:
    body = {"model": "tiny", "messages": user_message("Hi"), "role_mapping": {"user": "U: "}}
    answer = gateway.client.post("/v1/chat/completions", json=body | {"reasoning_budget": 5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "reasoning_budget"
