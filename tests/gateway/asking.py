"""Short ways to send a gateway chats and completions."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.gateway_process import TINY_TEXT, GatewayProcess

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
VOCABULARY: dict[str, int] = json.loads((TINY_TEXT / "tokenizer.json").read_text())["model"][
    "vocab"
]
ADDITION = "What is 7 plus 5?"
COUNTING = "Count to 20."


def user_message(text: str) -> list[dict[str, Any]]:
    """Messages with one user message."""
    return [{"role": "user", "content": text}]


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The body of a greedy chat request."""
    return {"model": "tiny", "messages": user_message(ADDITION), "temperature": 0, **fields}


def chat(gateway: GatewayProcess, **fields: Any) -> dict[str, Any]:
    """The chat.completion object."""
    answer = gateway.client.post("/v1/chat/completions", json=body_of(fields))
    assert answer.status_code == 200, "\n".join([answer.text, *gateway.log[-40:]])
    whole: dict[str, Any] = answer.json()
    return whole


def message(gateway: GatewayProcess, **fields: Any) -> dict[str, Any]:
    """The message of the only choice."""
    found: dict[str, Any] = chat(gateway, **fields)["choices"][0]["message"]
    return found


def refusal(gateway: GatewayProcess, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    """The error object of a request that gets a 400."""
    body = body_of(fields) if path.endswith("chat/completions") else {"model": "tiny", **fields}
    answer = gateway.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def complete(gateway: GatewayProcess, **fields: Any) -> dict[str, Any]:
    """The text_completion object."""
    body = {"model": "tiny", "temperature": 0, **fields}
    answer = gateway.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, "\n".join([answer.text, *gateway.log[-40:]])
    whole: dict[str, Any] = answer.json()
    return whole


def chunks(gateway: GatewayProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that ends without an error."""
    with gateway.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = [line.removeprefix("data: ") for line in answer.iter_lines() if line[:5] == "data:"]
    assert parts[-1] == "[DONE]"
    return [json.loads(text) for text in parts[:-1]]


def chat_chunks(gateway: GatewayProcess, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed chat."""
    return chunks(gateway, "/v1/chat/completions", body_of(fields))


def joined(answer: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice of a stream, joined as a client does it."""
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish": []}
    for choice in (c for chunk in answer for c in chunk["choices"] if c["index"] == index):
        delta = choice["delta"]
        whole["content"] += delta.get("content") or ""
        whole["reasoning_content"] += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(whole["tool_calls"]):
                whole["tool_calls"].append({**part, "function": {**part["function"]}})
            else:
                assert set(part) == {"index", "function"}
                call = whole["tool_calls"][part["index"]]
                call["function"]["arguments"] += part["function"]["arguments"]
        if choice["finish_reason"] is not None:
            whole["finish"].append(choice["finish_reason"])
    return whole
