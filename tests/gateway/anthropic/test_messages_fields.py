"""Every field of Anthropic's request is supported, left out, or refused where necessary."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.anthropic.request import MessagesRequest, chat_request
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.openai.chat_request import ChatCompletionRequest
from tests.gateway.requests_begun import begun

TOOL = {"name": "look", "input_schema": {"type": "object"}}
BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [TOOL],
}
HONOURED: dict[str, Any] = {
    "model": "other",
    "max_tokens": 6,
    "messages": [{"role": "user", "content": "ho"}],
    "system": "Be brief.",
    "tools": [TOOL | {"description": "Look."}],
    "tool_choice": {"type": "any"},
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low"},
    "output_format": {"type": "json_schema", "schema": {}},
    "stop_sequences": ["END"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "seed": 5,
}
NEUTRAL: dict[str, Any] = {
    "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"},
    "speed": "standard",
    "metadata": {"user_id": "u"},
    "user_profile_id": "u",
    "service_tier": "auto",
}
LEFT_OUT: dict[str, Any] = {
    "container": "c",
    "mcp_servers": [{"name": "s"}],
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "inference_geo": "eu",
    "diagnostics": {"previous_message_id": None},
    "fallbacks": ["other"],
}
REFUSED: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "stop": "END",
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "thread": {"type": "continue", "previous_message_id": "msg_1"},
    "compaction": {"type": "summarize"},
}
# its effect is how the answer is sent, which the gateway's tests of streams check
OF_THE_ANSWER = {"stream"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return chat_request(MessagesRequest.model_validate(BODY | fields)).chat


def test_every_field_has_a_test() -> None:
    known = HONOURED.keys() | OF_THE_ANSWER
    assert known == MessagesRequest.model_fields.keys()


@pytest.mark.parametrize("name", HONOURED)
def test_a_supported_field_changes_the_request(name: str) -> None:
    assert chat(**{name: HONOURED[name]}) != chat()


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_field_changes_nothing_and_is_listed(name: str, strict: Exchange) -> None:
    assert chat(**{name: NEUTRAL[name]}) == chat()
    assert list(strict.ignored) == [name]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_meaningless_field_is_left_out_unless_strict(name: str) -> None:
    running = begun()
    assert chat(**{name: LEFT_OUT[name]}) == chat()
    assert list(running.ignored) == [name]
    begun(strict=True)
    with pytest.raises(ValidationError) as caught:
        chat(**{name: LEFT_OUT[name]})
    assert caught.value.errors()[0]["loc"][0] == name
    assert chat(**{name: None}) == chat()


def test_nulls_and_empty_lists_equal_absence(strict: Exchange) -> None:
    assert chat(tools=[TOOL | {"type": None}], mcp_servers=[]) == chat()


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_named_and_null_passes(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**{name: REFUSED[name]})
    assert caught.value.param == name
    assert chat(**{name: None}) == chat()
