"""Every field of a Responses request is supported, left out, or refused where necessary."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.models.config import Parameters
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.responses.answer import echo_of
from gateway.responses.request import ResponsesRequest, chat_request
from gateway.responses.store import Store, items_of
from tests.gateway.requests_begun import begun

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
BODY: dict[str, Any] = {"model": "m", "input": "hi", "tools": [TOOL]}
HONOURED: dict[str, Any] = {
    "model": "other",
    "input": "ho",
    "instructions": "Be brief.",
    "tools": [TOOL | {"strict": True}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "text": {"format": {"type": "json_object"}},
    "reasoning": {"effort": "low"},
    "max_output_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "seed": 5,
    "stop": ["END"],
    "thinking_budget": 5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs"],
}
TOLD: dict[str, Any] = {
    "metadata": {"a": "b"},
    "store": False,
    "user": "u",
    "safety_identifier": "u",
    "prompt_cache_key": "k",
    "max_tool_calls": 3,
    "previous_response_id": "resp_x",  # the store's tests check that it is continued
}
NEUTRAL: dict[str, Any] = {
    "client_metadata": {"installation": "i"},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "stream_options": {"include_obfuscation": True},
}
LEFT_OUT: dict[str, Any] = {
    "truncation": "auto",
    "background": True,
    "context_management": [{"type": "compaction"}],
    "moderation": {"model": "x"},
    "include": ["web_search_call.results"],
}
REFUSED: dict[str, Any] = {
    "conversation": "c",
    "prompt": {"id": "p"},
    "response_format": {"type": "json_object"},
    "n": 2,
    "logprobs": True,
}
# its effect is how the answer is sent, which the gateway's tests of streams check
OF_THE_ANSWER = {"stream"}


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate(BODY | fields)


def chat(**fields: Any) -> ChatCompletionRequest:
    asked = request(**fields)
    return chat_request(asked, items_of(Store().resolved(asked.input))).chat


def test_every_field_has_a_test() -> None:
    known = HONOURED.keys() | TOLD.keys() | {"truncation"} | OF_THE_ANSWER
    assert known == ResponsesRequest.model_fields.keys()


@pytest.mark.parametrize("name", HONOURED)
def test_a_supported_field_changes_the_request(name: str) -> None:
    assert chat(**{name: HONOURED[name]}) != chat()


@pytest.mark.parametrize("name", TOLD)
def test_a_field_of_the_response_is_repeated_in_it(name: str) -> None:
    echo = echo_of(request(**{name: TOLD[name]}), Parameters(model="x"))
    assert echo[name] == TOLD[name]
    assert echo != echo_of(request(), Parameters(model="x"))


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_field_changes_nothing_and_is_listed(name: str, strict: Exchange) -> None:
    assert chat(**{name: NEUTRAL[name]}) == chat()
    assert list(strict.ignored) == [name]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_meaningless_field_is_left_out_unless_strict(name: str) -> None:
    running = begun()
    assert chat(**{name: LEFT_OUT[name]}) == chat()
    assert [each.partition("[")[0] for each in running.ignored] == [name]
    begun(strict=True)
    with pytest.raises(ValidationError) as caught:
        chat(**{name: LEFT_OUT[name]})
    assert caught.value.errors()[0]["loc"][0] == name
    assert chat(**{name: None}) == chat()


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_named_and_null_passes(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**{name: REFUSED[name]})
    assert caught.value.param == name
    assert chat(**{name: None}) == chat()
