"""A prompt that does not fit: an error that agents recognise, so that they compact and go on.

`tests/clients/test_full_context.py` runs the agents' own code.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.gateway.gateway_process import GatewayProcess
from tests.polling import until

CONTEXT = 1024  # of `tiny`
LONG = [{"role": "user", "content": "tick " * 2_000}]  # its tokens are counted
ENORMOUS = [{"role": "user", "content": "tick " * 300_000}]  # refused by its number of characters
# What each program looks for in the message of an error. Programs in brackets rely on the library.
RECOGNISERS = {
    "Claude Code 2.1": r"(?i)prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
    "Cline 3.0": r"(?i)\bprompt\s+is\s+too\s+long\b",
    "Continue 1.5": r"(?i)maximum context length",
    "LangChain 1.7": r"prompt is too long",
    "LiteLLM 1.106 (aider, OpenHands)": r"(?i)this model's maximum context length is",
    "opencode 1.18, pi 0.74": r"(?i)prompt is too long",
    "opencode 1.18, pi 0.74, for OpenRouter": r"(?i)maximum context length is \d+ tokens",
    "Qwen Code 0.15": r"(?i)(\d[\d,]*)\s*tokens?\s*>\s*(\d[\d,]*)",
    "Anthropic's API": r"prompt is too long: (\d+) tokens > (\d+) maximum",
}
# What they take for an error that only needs patience.
OTHER_ERRORS = r"(?i)rate.?limit|too many requests|deadline exceeded|timed? ?out|too many total"
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/completion",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
]


def _body(path: str, prompt: list[dict[str, str]], *, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "stream": stream}
    if path in ("/v1/completions", "/completion", "/api/generate"):
        return {**body, "prompt": prompt[0]["content"]}
    if path == "/v1/responses":
        return {**body, "input": prompt}
    body |= {"max_tokens": 8} if path == "/v1/messages" else {}
    return {**body, "messages": prompt}


def _require_recognised(error: Any, path: str) -> None:
    """Every program finds the words of this error, and no words of another kind of error."""
    sentence = error if isinstance(error, str) else error["message"]
    assert not re.search(OTHER_ERRORS, sentence)
    for program, pattern in RECOGNISERS.items():
        found = re.search(pattern, sentence)
        assert found, f"{program} does not recognise {sentence!r}"
        if found.groups():
            tokens, most = map(int, found.groups())
            assert most == CONTEXT - 1 < tokens, sentence
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
    elif not path.startswith("/api"):
        assert error["code"] == "context_length_exceeded"  # what Codex, opencode and Cline look for


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [LONG, ENORMOUS], ids=["counted", "estimated"])
@pytest.mark.parametrize("path", PATHS)
def test_agents_recognise_a_full_context(
    gateway: GatewayProcess, path: str, prompt: list[dict[str, str]], stream: bool
) -> None:
    answer = gateway.client.post(path, json=_body(path, prompt, stream=stream))
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert answer.headers["x-should-retry"] == "false"
    _require_recognised(error, path)
    if not path.startswith("/api") and path != "/v1/messages":
        assert error["param"] in ("messages", "prompt", "input")


@pytest.mark.parametrize("path", PATHS)
def test_agents_recognise_it_in_a_stream_that_has_begun(gateway: GatewayProcess, path: str) -> None:
    """A stream begins before the prompt is read if the model has to be loaded first."""
    unload = {"model": "tiny"}
    # An earlier request may still be using it.
    until(lambda: gateway.client.post("/v1/models/unload", json=unload).is_success)
    answer = gateway.client.post(path, json=_body(path, LONG, stream=True))
    assert answer.status_code == 200
    last = [line for line in answer.text.splitlines() if "prompt is too long" in line][-1]
    event = json.loads(last.removeprefix("data: "))
    _require_recognised(event["response"]["error"] if "response" in event else event["error"], path)


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/api/chat"])
def test_a_limit_beyond_the_context_is_no_error(gateway: GatewayProcess, path: str) -> None:
    """The answer ends where the context does, so no program meets Anthropic's older error."""
    body = _body(path, [{"role": "user", "content": "tick " * 400}], stream=False)
    limit = {"/v1/responses": "max_output_tokens", "/completion": "n_predict"}
    if path == "/api/generate":
        body["options"] = {"num_predict": 100_000}
    else:
        body[limit.get(path, "max_tokens")] = 100_000
    assert gateway.client.post(path, json=body).status_code == 200
