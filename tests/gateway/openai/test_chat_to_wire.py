"""What every field of a request becomes on the wire, without a process."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.rpc.template_messages import template_messages
from gateway import fields
from gateway.calls import Done, Event, Piece, ToolCallPiece, Usage
from gateway.context import Gateway
from gateway.errors import ApiError, found_in
from gateway.exchange import Exchange, Traffic
from gateway.metrics import Metrics
from gateway.models.config import ModelConfig
from gateway.models.reading import ModelFolder
from gateway.openai.answer import chat_answer
from gateway.openai.chat_request import ChatCompletionRequest, options_of
from gateway.openai.completion import CompletionRequest, completion_plan
from gateway.openai.field_names import names_of
from gateway.openai.sampling import SamplingFields, seed_of
from gateway.refusals import validated
from gateway.settings import GatewaySettings
from gateway.supervisor.supervisor import Supervisor
from tests.gateway.asking import WEATHER, user_message
from tests.gateway.requests_begun import begun
from wire import backend_pb2 as pb

SETTINGS = GatewaySettings(Path("models"))


def gateway_of() -> Gateway:
    traffic = Traffic()
    return Gateway(SETTINGS, Supervisor(SETTINGS, ModelFolder([], {})), traffic, Metrics())


def config_of(**fields: Any) -> ModelConfig:
    parameters = {"model": "checkpoint", **fields.pop("parameters", {})}
    return ModelConfig.model_validate({"name": "tiny", "parameters": parameters, **fields})


def translated(
    fields: dict[str, Any], config: ModelConfig | None = None
) -> list[pb.PredictOptions]:
    """The protocol messages for a chat request. Raises ApiError, as an endpoint would."""
    body = {"model": "tiny", "messages": user_message("Hi"), **fields}
    request = validated(ChatCompletionRequest, body)
    return asyncio.run(options_of(request, config or config_of(), gateway_of()))


def completion(fields: dict[str, Any]) -> list[pb.PredictOptions]:
    request = CompletionRequest.model_validate({"model": "tiny", "prompt": "x", **fields})
    return completion_plan(request, config_of()).wanted


def as_dict(options: pb.PredictOptions) -> dict[str, Any]:
    """The fields that differ from the protocol's default."""
    plain: dict[str, Any] = {}
    for field, value in options.ListFields():
        plain[field.name] = dict(value) if field.name == "Metadata" else value
    return plain


def test_converting_a_long_conversation_yields_to_other_tasks() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 1000
    request = ChatCompletionRequest.model_validate({"model": "tiny", "messages": turns})

    async def others() -> int:
        work = asyncio.ensure_future(options_of(request, config_of(), gateway_of()))
        turns = 0
        while not work.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(others()) >= 4


PLAIN = as_dict(translated({})[0])


def test_a_request_without_options_gets_openais_defaults() -> None:
    assert {**PLAIN, "Messages": None} == {
        "Messages": None,
        "UseTokenizerTemplate": True,
        "Temperature": 1.0,
        "TopP": 1.0,
        "TypicalP": 1.0,
        "Penalty": 1.0,
        "Repeat": 64,
        "Seed": -1,
    }


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"temperature": 0}, {"Temperature": None}),
        ({"temperature": 0.5}, {"Temperature": 0.5}),
        ({"top_p": 0.25}, {"TopP": 0.25}),
        ({"top_k": 7}, {"TopK": 7}),
        ({"top_k": -1}, {"TopK": -1}),
        ({"min_p": 0.5}, {"MinP": 0.5}),
        ({"typical_p": 0.5}, {"TypicalP": 0.5}),
        ({"xtc_probability": 0.5}, {"Metadata": {"mlx.xtc_probability": "0.5"}}),
        ({"xtc_threshold": 0.1}, {"Metadata": {"mlx.xtc_threshold": "0.1"}}),
        ({"presence_penalty": 0.5}, {"PresencePenalty": 0.5}),
        ({"frequency_penalty": -0.5}, {"FrequencyPenalty": -0.5}),
        ({"repeat_penalty": 1.5}, {"Penalty": 1.5}),
        ({"repetition_penalty": 1.5}, {"Penalty": 1.5}),
        ({"repetition_penalty": 1.5, "repeat_penalty": 1.5}, {"Penalty": 1.5}),
        ({"repeat_last_n": 5}, {"Repeat": 5}),
        ({"repetition_context_size": 20}, {"Repeat": 20}),
        ({"repeat_last_n": -1}, {"Repeat": -1}),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, {"Repeat": None, "Penalty": 1.0}),
        ({"logit_bias": {"5": -100}}, {"LogitBias": '{"5": -100.0}'}),
        ({"logit_bias": {}}, {}),
        ({"logit_bias": [[5, 2], [6, False]]}, {"LogitBias": '{"5": 2.0, "6": -1000000.0}'}),
        ({"seed": 3}, {"Seed": 3}),
        ({"seed": -1}, {}),
        ({"max_tokens": 5}, {"Tokens": 5}),
        ({"max_completion_tokens": 5}, {"Tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 5}, {"Tokens": 5}),
        ({"n_predict": 5}, {"Tokens": 5}),
        ({"max_tokens": -1}, {}),
        ({"min_tokens": 5}, {"Metadata": {"mlx.min_tokens": "5"}}),
        ({"ignore_eos": True}, {"IgnoreEOS": True}),
        ({"stop_token_ids": [2, 7]}, {"Metadata": {"mlx.stop_token_ids": "[2, 7]"}}),
        ({"stop": "a"}, {"StopPrompts": ["a"]}),
        ({"stop": ["a", "b"]}, {"StopPrompts": ["a", "b"]}),
        ({"num_draft_tokens": 4}, {"NDraft": 4}),
        ({"num_draft_tokens": 0}, {"NDraft": -1}),
        ({"logprobs": True}, {"Logprobs": 1, "Metadata": {"mlx.stream_logprobs": "true"}}),
        ({"logprobs": False}, {}),
        ({"enable_thinking": False}, {"Metadata": {"enable_thinking": "false"}}),
        ({"reasoning_effort": "low"}, {"Metadata": {"reasoning_effort": "low"}}),
        *(
            (fields, {"Metadata": {"mlx.thinking_budget": "9"}})
            for fields in (
                {"thinking_budget": 9},
                {"reasoning_budget": 9, "thinking_token_budget": 9},
                {"thinking_budget_tokens": 9, "reasoning": {"max_tokens": 8}},
                {"reasoning": {"max_tokens": 9}},
                {"thinking": {"budget_tokens": 9}},
            )
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}, "enable_thinking": False},
            {"Metadata": {"mlx.thinking_budget": "9", "enable_thinking": "false"}},
        ),
        ({"thinking": {"type": "adaptive"}, "reasoning_budget": None}, {}),
        (
            {"chat_template_kwargs": {"a": [1]}},
            {"Metadata": {"chat_template_kwargs": '{"a": [1]}'}},
        ),
        ({"response_format": {"type": "text"}}, {}),
        ({"tools": []}, {}),
        ({"tool_choice": "auto"}, {}),
        ({"adapters": None, "draft_model": None}, {}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_every_field_reaches_the_backend(fields: dict[str, Any], changed: dict[str, Any]) -> None:
    expected = {name: value for name, value in (PLAIN | changed).items() if value is not None}
    assert as_dict(translated(fields)[0]) == expected


FILE = config_of(
    parameters={
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.5,
        "typical_p": 0.5,
        "max_tokens": 50,
        "seed": 50,
        "repeat_penalty": 1.5,
        "repeat_last_n": 5,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "logit_bias": {"5": 5},
        "ignore_eos": True,
    },
    stopwords=["five"],
    reasoning={"disable": True},
    reasoning_effort="low",
    chat_template_kwargs={"five": 5, "six": 6},
)


def test_the_models_file_applies_if_the_request_is_silent() -> None:
    assert {**as_dict(translated({}, FILE)[0]), "Messages": None} == {
        "Messages": None,
        "UseTokenizerTemplate": True,
        "Temperature": 0.5,
        "TopP": 0.5,
        "TopK": 5,
        "MinP": 0.5,
        "TypicalP": 0.5,
        "Tokens": 50,
        "Seed": 50,
        "Penalty": 1.5,
        "Repeat": 5,
        "FrequencyPenalty": 0.5,
        "PresencePenalty": 0.5,
        "LogitBias": '{"5": 5.0}',
        "IgnoreEOS": True,
        "StopPrompts": ["five"],
        "Metadata": {
            "enable_thinking": "false",
            "reasoning_effort": "low",
            "chat_template_kwargs": '{"five": 5, "six": 6}',
        },
    }


def test_the_request_overrides_the_models_file() -> None:
    converted = as_dict(
        translated(
            {
                "temperature": 0,
                "top_k": 0,
                "seed": 7,
                "logit_bias": {},
                "ignore_eos": False,
                "stop": "seven",
                "enable_thinking": True,
                "reasoning_effort": "high",
                "chat_template_kwargs": {"six": 7},
            },
            FILE,
        )[0]
    )
    assert {"Temperature", "TopK", "LogitBias", "IgnoreEOS"}.isdisjoint(converted)
    assert converted["Seed"] == 7
    assert converted["StopPrompts"] == ["seven", "five"]
    assert converted["Metadata"] == {
        "enable_thinking": "true",
        "reasoning_effort": "high",
        "chat_template_kwargs": '{"five": 5, "six": 7}',
    }


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 127))
def test_any_seed_is_valid_and_only_minus_one_draws_a_random_one(seed: int, choice: int) -> None:
    sent = seed_of(SamplingFields.model_validate({"seed": seed}), config_of(), choice)
    assert -(2**31) <= sent < 2**31
    assert (sent == -1) == (seed == -1)
    if 0 <= seed < 2**31 - 128:
        assert sent == seed + choice


# Values that mean "off", besides those that count as false.
OFF: dict[str, Any] = {"t_max_predict_ms": -1, "truncate_prompt_tokens": -1, "modalities": ["text"]}


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
def test_an_empty_medium_is_refused(kind: str) -> None:
    content = [{"type": kind, kind: ""}]
    with pytest.raises(ApiError, match="is empty") as caught:
        translated({"messages": [{"role": "user", "content": content}]})
    assert (caught.value.status, caught.value.param) == (400, f"messages[0].content[0].{kind}")


@pytest.mark.parametrize("name", fields.CHAT.refused)
def test_a_refused_field_passes_if_its_value_asks_for_nothing(name: str) -> None:
    offs: list[Any] = [None, 0, "", [], OFF.get(name)]
    for off in offs:
        assert as_dict(translated({name: off})[0]) == PLAIN
    with pytest.raises(ApiError) as caught:
        translated({name: {"on": 1}})
    assert caught.value.status == 400
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize("name", fields.COMPLETION.refused)
def test_completions_refuse_fields_by_name_too(name: str) -> None:
    for off in (None, False, OFF.get(name)):
        assert as_dict(completion({name: off})[0]) == as_dict(completion({})[0])
    with pytest.raises(ApiError) as caught:
        completion({name: {"on": 1}})
    assert caught.value.param == name


def test_a_contradiction_is_reported_with_the_clients_field_names() -> None:
    with pytest.raises(ApiError, match="is 'none' and enable_thinking is true"):
        translated({"reasoning_effort": "none", "enable_thinking": True})
    with pytest.raises(ApiError, match="two names for one field"):
        translated({"thinking_budget": 5, "reasoning_budget": 6})


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": "True"}},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
        {"role_mapping": {"user": "a"}, "chat_template_kwargs": {}},
    ],
    ids=str,
)
def test_fields_that_agree_or_ask_for_nothing_pass(fields: dict[str, Any]) -> None:
    assert translated(fields)


@pytest.mark.parametrize(
    ("file", "arguments", "metadata"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": True}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "high"}, {}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "low"}, {"other": 1}, {"reasoning_effort": "low"}),
        ({"reasoning": {"disable": True}}, {"enable_thinking": True}, {}),
    ],
    ids=str,
)
def test_a_template_argument_of_the_request_overrides_the_models_file(
    file: dict[str, Any], arguments: dict[str, Any], metadata: dict[str, Any]
) -> None:
    converted = as_dict(translated({"chat_template_kwargs": arguments}, config_of(**file))[0])[
        "Metadata"
    ]
    assert converted == {"chat_template_kwargs": json.dumps(arguments), **metadata}


@pytest.mark.parametrize("kind", ["presence", "frequency"])
def test_the_window_of_a_penalty(kind: str) -> None:
    window, penalty = f"{kind}_context_size", f"{kind}_penalty"
    field = f"{kind.title()}Penalty"
    # mlx_lm.server's clients send it with its other defaults.
    assert as_dict(translated({window: 20})[0]) == PLAIN
    assert as_dict(translated({window: 20, penalty: 0})[0]) == PLAIN
    sent = as_dict(translated({window: 20, penalty: 0.5})[0])
    assert sent == PLAIN | {field: 0.5, "Metadata": {f"mlx.{kind}_window": "20"}}
    assert as_dict(translated({window: 0, penalty: 0.5})[0]) == PLAIN


BEGUN = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]


@pytest.mark.parametrize(
    "fields",
    [
        *({name: {}} for name in ("json_schema", "guided_json", "structured_outputs")),
        *({name: ""} for name in ("json_schema", "guided_grammar", "guided_regex", "grammar")),
        {"guided_choice": [], "structured_outputs": {"choice": [], "json": {}, "regex": ""}},
    ],
)
def test_an_empty_format_is_no_format(fields: dict[str, Any]) -> None:
    """What web forms and SillyTavern send for a field that is not filled in."""
    assert as_dict(translated(fields)[0]) == PLAIN


@pytest.mark.parametrize("opens", [{}, {"add_generation_prompt": False}])
def test_a_begun_answer_is_continued(opens: dict[str, Any]) -> None:
    asked = {"messages": BEGUN, "continue_final_message": True, **opens}
    assert translated(asked)[0].Metadata["mlx.continue_final_message"] == "true"
    assert as_dict(translated({"add_generation_prompt": True})[0]) == PLAIN
    assert as_dict(translated({"continue_final_message": False})[0]) == PLAIN


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_last_message_may_ask_to_be_continued_itself(name: str) -> None:
    """The fields are those of the APIs of Mistral and DeepSeek, and of Kimi."""
    begun = [*BEGUN[:-1], {**BEGUN[-1], name: True}]
    (plain,) = translated({"messages": BEGUN})
    (marked,) = translated({"messages": begun})
    assert marked.Metadata["mlx.continue_final_message"] == "true"
    assert "mlx.continue_final_message" not in plain.Metadata
    (not_last,) = translated({"messages": [*begun, {"role": "user", "content": "Hi"}]})
    assert "mlx.continue_final_message" not in not_last.Metadata


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"messages": BEGUN, "continue_final_message": True, "role_mapping": {}},
            "continue_final_message",
        ),
    ],
)
def test_a_turn_begins_or_continues(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        translated(body)
    assert (caught.value.status, caught.value.param) == (400, param)


def part(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [fields]}]


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
USED_BY_A_USER = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
URL_OF_AN_IMAGE = "messages[0].content[0].source.url"
CALLED = {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo"),
        ({"messages": [CALLED]}, "messages[0].tool_calls"),
        ({"messages": part(type="text", text=5)}, "messages[0].content[0].text"),
        ({"messages": part(type="text")}, "messages[0].content[0].text"),
        ({"messages": part(type="smell")}, "messages[0].content[0].type"),
        (
            {"messages": part(type="image_url", image_url="data:,", text="caption")},
            "messages[0].content[0]",
        ),
        ({"messages": part(type="text", text="x", image_url="data:,")}, "messages[0].content[0]"),
        ({"messages": part(type="file", file={})}, "messages[0].content[0].type"),
        (
            {"messages": part(type="video_url", video_url={})},
            "messages[0].content[0].video_url.url",
        ),
        ({"messages": part(type="input_video")}, "messages[0].content[0].video_url"),
        ({"messages": part(type="video", video="AA")}, "messages[0].content[0].type"),
        ({"messages": part(**USED_BY_A_USER)}, "messages[0].content[0]"),
        ({"messages": part(type="image", source={"type": "url"})}, URL_OF_AN_IMAGE),
        (
            {"messages": part(type="input_audio", input_audio={"data": "", "format": "x"})},
            "messages[0].content[0].input_audio.format",
        ),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -7}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"repeat_penalty": 2, "repetition_penalty": 3}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"1": "b"}}, "logit_bias.1"),
        ({"logit_bias": [["a", 2]]}, "logit_bias.a"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"logprobs": True, "include_reasoning": False}, "include_reasoning"),
        ({"n_probs": 2, "include_reasoning": False}, "include_reasoning"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].type"),
        ({"tool_choice": {"type": "custom"}, "tools": [WEATHER]}, "tool_choice.custom"),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": "g"}}, "tools": [WEATHER]},
            "tool_choice.custom.name",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "tool_choice.function"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [WEATHER]},
            "tool_choice.function.name",
        ),
        ({"function_call": {"name": "f"}}, "function_call.name"),
        ({"functions": [{"name": "f"}], "tools": [{"function": {"name": "f"}}]}, "functions"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {**FORM, "schema": {}}}, "response_format.schema"),
        ({"response_format": {**FORM, "type": "text"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": "{"}}, "response_format.schema"),
        ({"response_format": FORM, "grammar": "root ::= [a]"}, "grammar"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"structured_outputs": {"tags": ["a"]}}, "structured_outputs.tags"),
        ({"role_mapping": {"user": "a"}, "tools": [WEATHER]}, "role_mapping"),
        ({"role_mapping": {}, "messages": user_message("")}, "messages"),
        ({"role_mapping": {}, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"role_mapping": {}, "enable_thinking": False}, "enable_thinking"),
        ({"role_mapping": {}, "reasoning_effort": "low"}, "reasoning_effort"),
        ({"role_mapping": {}, "include_reasoning": False}, "include_reasoning"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs",
        ),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": "perhaps"}},
            "chat_template_kwargs",
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": "true"}},
            "chat_template_kwargs",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "chat_template_kwargs",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_name_the_path_of_the_field(
    fields: dict[str, Any], param: str, strict: Exchange
) -> None:
    with pytest.raises(ApiError) as caught:
        translated(fields)
    assert caught.value.status == 400
    assert caught.value.param == param, caught.value.message
    assert "literal" not in caught.value.message


def test_llama_cpps_limit_of_0_only_reads_the_prompt() -> None:
    assert translated({"n_predict": 0})[0].Metadata["mlx.prompt_only"] == "true"
    for other in ({"n_predict": 0, "max_tokens": 9}, {"options": {"num_predict": 0}}):
        assert "mlx.prompt_only" not in translated(other)[0].Metadata


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_0_is_no_limit(name: str) -> None:
    assert as_dict(translated({name: 0})[0]) == PLAIN
    assert (
        translated({name: 0}, config_of(parameters={"model": "x", "max_tokens": 7}))[0].Tokens == 7
    )
    assert translated({"max_tokens": 9, "max_completion_tokens": 0})[0].Tokens == 9


@pytest.mark.parametrize(
    ("own", "member"),
    [
        ("repetition_penalty", "repeat_penalty"),
        ("repetition_context_size", "repeat_last_n"),
        ("max_completion_tokens", "num_predict"),
    ],
)
def test_a_field_wins_over_the_same_field_of_options_with_another_name(
    own: str, member: str
) -> None:
    (alone,) = translated({own: 3})
    assert as_dict(translated({own: 3, "options": {member: 2}})[0]) == as_dict(alone)
    assert as_dict(translated({"options": {member: 2}})[0]) != as_dict(alone)


def test_a_wrong_union_lists_all_valid_types() -> None:
    with pytest.raises(ApiError, match="stop should be a string or a list"):
        translated({"stop": 5})


def test_legacy_turns_become_calls_and_results() -> None:
    call = {"name": "f", "arguments": '{"a": 1}'}
    (options,) = translated(
        {
            "messages": [
                *user_message("x"),
                {"role": "assistant", "content": None, "function_call": call},
                {"role": "function", "name": "f", "content": "5"},
            ]
        }
    )
    _, asked, answered = options.Messages
    assert json.loads(asked.tool_calls)[0]["function"] == call
    assert (answered.role, answered.name) == ("tool", "f")
    assert answered.tool_call_id == json.loads(asked.tool_calls)[0]["id"] != ""


def test_a_result_gets_the_name_of_its_function() -> None:
    calls = [{"id": "7", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns = [
        *user_message("x"),
        {"role": "assistant", "content": "", "tool_calls": calls, "annotations": []},
        {"role": "tool", "tool_call_id": "7", "content": [{"type": "text", "text": "5"}]},
    ]
    assert translated({"messages": turns})[0].Messages[2].name == "f"


PNG = "data:image/png;base64,iVBORw0KGgo="
WAV = base64.b64encode(b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 28).decode()


@pytest.mark.parametrize(
    ("after", "roles", "indices"),
    [
        ([], ["user", "assistant", "tool", "tool", "user"], [4, 4]),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": PNG}]}],
            ["user", "assistant", "tool", "tool", "user"],
            [4, 4, 4],
        ),
        (
            [{"role": "assistant", "content": "A cat."}, *user_message("And?")],
            ["user", "assistant", "tool", "tool", "user", "assistant", "user"],
            [4, 4],
        ),
    ],
)
def test_images_of_results_are_shown_in_a_user_message(
    after: list[dict[str, Any]], roles: list[str], indices: list[int]
) -> None:
    calls = [{"id": name, "function": {"name": "look", "arguments": "{}"}} for name in "ab"]
    seen = [{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": PNG}}]
    results = [{"role": "tool", "tool_call_id": name, "content": seen} for name in "ab"]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    (options,) = translated({"messages": [*user_message("x"), asked, *results, *after]})
    assert [message.role for message in options.Messages] == roles
    assert [message.content for message in options.Messages[2:4]] == ["seen", "seen"]
    assert json.loads(options.Metadata["mlx.image_messages"]) == indices
    assert list(options.Images) == [PNG] * len(indices)


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_the_name_of_a_tool_may_stand_beside_the_rest(kind: str) -> None:
    """LocalAI's documentation shows tools in this form."""
    beside = {"type": kind, "name": "f", kind: {"description": "d"}}
    within = {"type": kind, kind: {"name": "f", "description": "d"}}
    both = {"type": kind, "name": "g", kind: {"name": "f", "description": "d"}}
    tools = [json.loads(translated({"tools": [each]})[0].Tools) for each in (beside, within, both)]
    assert tools[0] == tools[1] == tools[2]
    chosen = {"type": "function", "name": "f", "function": {}}
    (options,) = translated({"tools": [within], "tool_choice": chosen})
    assert json.loads(options.ToolChoice)["function"]["name"] == "f"


IMAGE = {"type": "image_url", "image_url": {"url": PNG}}
TONE = {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}}


@pytest.mark.parametrize(
    ("parts", "content", "images", "audios"),
    [
        (
            ["Before:", IMAGE, "After:", IMAGE, "What?"],
            "Before:After:What?",
            [[2, 7, 0], [2, 13, 1]],
            None,
        ),
        ([IMAGE, IMAGE, "What?"], "What?", [2, 2], None),
        (["What?", IMAGE], "What?", [[2, 5, 0]], None),
        ([TONE, IMAGE, "😀", TONE], "😀", [[2, 0, 1]], [2, [2, 1, 2]]),
    ],
)
def test_parts_keep_their_order(
    parts: list[Any], content: str, images: list[Any], audios: list[Any] | None
) -> None:
    """A position is a message, a number of characters before the item, and a number among items."""
    typed = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    begun = [*user_message("x"), {"role": "assistant", "content": "y"}]
    (options,) = translated({"messages": [*begun, {"role": "user", "content": typed}]})
    assert options.Messages[2].content == content
    assert json.loads(options.Metadata["mlx.image_messages"]) == images
    assert json.loads(options.Metadata.get("mlx.audio_messages", "null")) == audios


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_images_of_other_roles_are_shown_in_a_user_message(role: str) -> None:
    """Those that a model made, as Zed and Open WebUI send them back."""
    seen = [{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": PNG}}]
    begun = [*user_message("x"), {"role": role, "content": seen}]
    for after, roles in (
        ([], ["user"]),
        (user_message("So?"), ["user"]),
        ([{"role": "assistant", "content": "a"}], ["user", "assistant"]),
    ):
        (options,) = translated({"messages": [*begun, *after]})
        assert [message.role for message in options.Messages] == ["user", role, *roles]
        assert options.Messages[1].content == "seen"
        assert json.loads(options.Metadata["mlx.image_messages"]) == [2]
        assert list(options.Images) == [PNG]


USED = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}}
SHOT = {"type": "base64", "media_type": "image/png", "data": PNG.partition(",")[2]}
SEEN = [{"type": "text", "text": "a"}, {"type": "image", "source": SHOT}]
FOUND = {"type": "tool_result", "tool_use_id": "t1", "content": [*SEEN, SEEN[0]], "is_error": True}
BLOCKS: list[dict[str, Any]] = [
    *user_message("x"),
    {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USED]},
    {"role": "user", "content": [FOUND, {"type": "text", "text": "So?"}]},
]


def test_anthropics_calls_and_results_become_calls_and_tool_messages(strict: Exchange) -> None:
    (options,) = translated({"messages": BLOCKS})
    _, asked, found, more = options.Messages
    assert (asked.role, asked.content) == ("assistant", "I look.")
    function = {"name": "look", "arguments": '{"at": "é"}'}
    assert json.loads(asked.tool_calls) == [{"id": "t1", "type": "function", "function": function}]
    assert (found.role, found.tool_call_id, found.name) == ("tool", "t1", "look")
    assert found.content == "Error: a\na"
    assert (more.role, more.content) == ("user", "So?")
    assert list(options.Images) == [PNG]
    assert json.loads(options.Metadata["mlx.image_messages"]) == [3]
    assert strict.ignored == {}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": PNG, "detail": "auto"},
        {"type": "image", "image": PNG},
        {"type": "image", "image_url": {"url": PNG}},
    ],
)
def test_an_image_in_another_librarys_form_is_shown(part: dict[str, Any]) -> None:
    """The forms are those of `/responses` and of Hugging Face's messages."""
    (options,) = translated({"messages": [{"role": "user", "content": [part]}]})
    assert list(options.Images) == [PNG]


def test_a_call_that_is_sent_in_both_forms_is_one_call() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turn = {"role": "assistant", "content": [USED, USED | {"id": "t2"}], "tool_calls": [call]}
    (options,) = translated({"messages": [*user_message("x"), turn]})
    assert [call["id"] for call in json.loads(options.Messages[1].tool_calls)] == ["t1", "t2"]


def test_a_backends_messages_have_the_clients_paths() -> None:
    """A result in a separate message, or a message added for media, shifts the indices after it."""
    result = {"role": "tool", "tool_call_id": "t1", "content": SEEN}
    turns = [*BLOCKS[:2], result, *BLOCKS, {"role": "user", "content": SEEN}]
    request = ChatCompletionRequest.model_validate({"messages": turns})
    (options,) = translated({"messages": turns})
    names = names_of(request)
    places = [names[f"Messages[{at}]"] for at in range(len(options.Messages))]
    assert places == [
        *("messages[0]", "messages[1]", "messages[2]"),
        *("messages[3]", "messages[4]", "messages[5].content[0]", "messages[5]", "messages[6]"),
    ]
    turns = [*BLOCKS[:2], result, *BLOCKS[1:2]]
    names = names_of(ChatCompletionRequest.model_validate({"messages": turns}))
    assert found_in(names, "Messages[4].tool_calls") == ("messages[3]", ".tool_calls")
    assert found_in(names, "Images[0]") == ("messages[2].content[1].source", "")
    assert found_in(names, "Messages") == ("messages", "")


def test_a_template_variable_has_the_path_at_which_it_was_sent() -> None:
    body: dict[str, Any] = {"messages": user_message("x")}
    sent = body | {"chat_template_kwargs": {"enable_thinking": "perhaps"}}
    names = names_of(ChatCompletionRequest.model_validate(sent))
    path = "chat_template_kwargs.enable_thinking"
    assert found_in(names, "Metadata enable_thinking") == (path, "")
    names = names_of(ChatCompletionRequest.model_validate(body))
    assert found_in(names, "Metadata enable_thinking") == ("Metadata enable_thinking", "")


PATCH = {"name": "patch", "description": "Edit."}
LARK = {"syntax": "lark", "definition": "start: /x/"}
CUSTOM = {"type": "custom", "custom": PATCH | {"format": {"type": "grammar", "grammar": LARK}}}


def test_a_custom_tool_is_a_function_with_one_text_argument(strict: Exchange) -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "a\n"}}
    turns = [
        *user_message("x"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    choice = {"type": "custom", "custom": {"name": "patch"}}
    (options,) = translated({"messages": turns, "tools": [CUSTOM], "tool_choice": choice})
    (tool,) = json.loads(options.Tools)
    assert (tool["type"], tool["function"]["name"]) == ("function", "patch")
    assert list(tool["function"]["parameters"]["properties"]) == ["input"]
    assert "start: /x/" in tool["function"]["description"]
    assert json.loads(options.ToolChoice)["function"] == {"name": "patch"}
    (made,) = json.loads(options.Messages[1].tool_calls)
    assert made["function"] == {"name": "patch", "arguments": json.dumps({"input": "a\n"})}
    assert list(strict.ignored) == ["tools[].format"]
    allowed = {"mode": "required", "tools": [choice]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    (options,) = translated({"tools": [CUSTOM, WEATHER], "tool_choice": choice})
    assert [each["function"]["name"] for each in json.loads(options.Tools)] == ["patch"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "a\\nb"}', "a\nb"), ('{"input": ""}', ""), ('{"in": 1}', '{"in": 1}')],
)
def test_a_call_of_a_custom_tool_has_its_text(arguments: str, text: str) -> None:
    """The text is the same in one piece and in a stream that is cut into single characters."""
    request = ChatCompletionRequest.model_validate({"messages": user_message("x")} | OFFER)
    pieces = [Piece(tool_calls=(ToolCallPiece(0, "c1", "patch"),))]
    pieces += [Piece(tool_calls=(ToolCallPiece(0, arguments=each),)) for each in arguments]

    streamed, whole = chat_answer({"id": "a"}, request), chat_answer({}, request)
    chunks = ""
    events: list[Event] = [*pieces, Done("stop", Usage())]
    for event in events:
        chunks += streamed.write(streamed.take((0, event)))
        whole.add((0, event))
    answer = whole.whole()["choices"][0]
    custom = {"name": "patch", "input": text}
    assert answer["message"]["tool_calls"] == [{"id": "c1", "type": "custom", "custom": custom}]
    lines = chunks.replace("data: ", "").split("\n\n")[:-2]
    choices = [json.loads(line)["choices"][0] for line in lines]
    parts = [part for each in choices for part in each["delta"].get("tool_calls", ())]
    assert parts[0] == {
        "index": 0,
        "id": "c1",
        "type": "custom",
        "custom": {"name": "patch", "input": ""},
    }
    assert "".join(part["custom"]["input"] for part in parts) == text
    assert choices[-1]["finish_reason"] == answer["finish_reason"] == "tool_calls"


OFFER = {"tools": [CUSTOM]}


def test_a_result_without_content_is_empty() -> None:
    turn = {"role": "tool", "tool_call_id": "7", "content": None}
    assert translated({"messages": [*user_message("x"), turn]})[0].Messages[1].content == ""


@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning": "I count."},
        {"reasoning_content": "I count.", "thinking_blocks": [{"thinking": "Not this."}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "I "}, {"thinking": "count."}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "I count."}, {"data": "x"}]},
    ],
)
def test_earlier_reasoning_reaches_the_template(thought: dict[str, Any]) -> None:
    turn = {"role": "assistant", "content": "5", **thought}
    got = translated({"messages": [*user_message("x"), turn]})[0].Messages[1]
    assert (got.content, got.reasoning_content) == ("5", "I count.")


def test_parts_of_a_system_message_are_lines_of_their_own() -> None:
    """claude-code-router sends Claude Code's like this; the model is not shown the first line."""
    texts = ("x-anthropic-billing-header: cc_version=2; cch=1;", "You are an agent.", "\nBe brief.")
    parts = [{"type": "text", "text": text} for text in texts]
    turn = {"role": "system", "content": parts}
    got = translated({"messages": [turn, *user_message("x")]})[0].Messages
    assert got[0].content == "\n".join(texts)
    assert template_messages(got)[0]["content"] == "You are an agent.\n\nBe brief."


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "I count.", "signature": "s"},
        {"type": "thinking", "thinking": [{"type": "text", "text": t} for t in ("I ", "count.")]},
        {"type": "reasoning", "text": "I count."},
        {"type": "reasoning", "reasoning": "I count.", "index": 0},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I count."}]},
    ],
)
def test_reasoning_among_the_parts_of_a_message_reaches_the_template(part: dict[str, Any]) -> None:
    parts = [part, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "5"}]
    test_earlier_reasoning_reaches_the_template({"content": parts})
    test_earlier_reasoning_reaches_the_template({"content": parts, "reasoning": "I count."})
    begun(strict=True)
    with pytest.raises(ApiError, match="belong to messages of the role assistant"):
        translated({"messages": [{"role": "user", "content": parts}]})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "", "signature": "of another provider"},
    ],
)
def test_reasoning_that_only_its_provider_can_read_is_listed(part: dict[str, Any]) -> None:
    running = begun()
    parts = [part, {"type": "text", "text": "5"}]
    messages = [{"role": "assistant", "content": parts}, {"role": "user", "content": "x"}]
    (options,) = translated({"messages": messages})
    assert options.Messages[0].content == "5"
    assert list(running.ignored) == [f"messages[].content[][{part['type']}]"]


def test_reasoning_among_the_parts_of_a_users_message_is_left_out_and_listed() -> None:
    running = begun()
    parts = [{"type": "thinking", "thinking": "I count."}, {"type": "text", "text": "5"}]
    (options,) = translated({"messages": [{"role": "user", "content": parts}]})
    (message,) = options.Messages
    assert (message.content, message.reasoning_content) == ("5", "")
    assert list(running.ignored) == ["messages[].content[][thinking]"]


@pytest.mark.parametrize(
    ("fields", "listed"),
    [
        ({"content": "5", "refusal": "No."}, "refusal"),
        ({"content": [{"type": "text", "text": "5"}], "refusal": "No."}, "refusal"),
        ({"content": "5", "reasoning": "I add.", "reasoning_content": "I count."}, "reasoning"),
        ({"content": "5", "reasoning": "I count.", "reasoning_content": "I count."}, ""),
        ({"content": "", "refusal": "No."}, ""),
    ],
)
def test_a_field_that_another_replaces_is_listed(fields: dict[str, Any], listed: str) -> None:
    messages = [*user_message("?"), {"role": "assistant", **fields}, *user_message("?")]
    running = begun()
    translated({"messages": messages})
    assert list(running.ignored) == [f"messages[].{listed}"] * bool(listed)
    begun(strict=True)
    with pytest.raises(ApiError, match=f"{listed} differs from") if listed else nullcontext():
        translated({"messages": messages})


def test_a_prefix_that_is_not_the_last_message_is_listed() -> None:
    """Only the last message can be continued."""
    running = begun()
    start = {"role": "assistant", "content": "5", "prefix": True}
    translated({"messages": [*user_message("?"), start, *user_message("?")]})
    assert list(running.ignored) == ["messages[].prefix"]
    running = begun()
    translated({"messages": [*user_message("?"), start]})
    assert not running.ignored


def test_a_summary_of_reasoning_reaches_the_template() -> None:
    details = [{"type": "reasoning.summary", "summary": "I count."}]
    message = {"role": "assistant", "content": "5", "reasoning_details": details}
    (options,) = translated({"messages": [*user_message("?"), message, *user_message("?")]})
    assert options.Messages[1].reasoning_content == "I count."


def test_a_bool_is_not_a_number_of_alternatives() -> None:
    (converted,) = completion({"logprobs": True})
    assert (converted.Logprobs, converted.TopLogprobs) == (1, 0)
    (converted,) = completion({"logprobs": 0})
    assert (converted.Logprobs, converted.TopLogprobs) == (1, 0)
    (converted,) = completion({"logprobs": False})
    assert converted.Logprobs == 0


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"options": {"temperature": 0.5, "num_predict": 7}}, {"temperature": 0.5, "n_predict": 7}),
        ({"options": {"num_predict": -2, "stop": ["x"]}}, {"stop": ["x"]}),
        (
            {"options": {"top_k": 2, "num_predict": 7}, "max_tokens": 3},
            {"top_k": 2, "max_tokens": 3},
        ),
        ({"options": {"seed": 4}, "seed": 5}, {"seed": 5}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"enabled": False, "exclude": False}}, {"enable_thinking": False}),
        (
            {"reasoning": {"effort": "low"}, "reasoning_effort": "high"},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_nested_objects_set_the_fields_they_mean(
    fields: dict[str, Any], same: dict[str, Any]
) -> None:
    assert translated(fields) == translated({"seed": -1} | same if "seed" not in same else same)


def test_excluded_reasoning_is_not_returned() -> None:
    body = {"messages": user_message("Hi"), "reasoning": {"exclude": True}}
    answer = chat_answer({"id": "a"}, ChatCompletionRequest.model_validate(body))
    for event in (Piece("Hello", reasoning="Hm"), Done("stop", Usage())):
        answer.add((0, event))
    message = answer.whole()["choices"][0]["message"]
    assert message["content"] == "Hello"
    assert "reasoning_content" not in message
