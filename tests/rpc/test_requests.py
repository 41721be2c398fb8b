"""Every field of PredictOptions is read, refused by name, or listed as having no meaning."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.errors import InvalidRequest
from backend.engine.request import WHOLE, ChatPrompt, Extras, GenerationRequest, RawPrompt
from backend.rpc import requests
from backend.rpc.fields import PREDICT_OPTIONS
from backend.rpc.request_metadata import RESERVED, template_arguments
from backend.rpc.requests import generation_request
from common.field_names import written
from tests.rpc.fake_engine import SERVED
from tests.rpc.recorder import Recorder
from tests.rpc.requests_of_hosts import predict_options
from wire import backend_pb2 as pb

# Read by the identity check and by the Embedding RPC.
ELSEWHERE = {"ModelIdentity", "Embeddings", "EmbeddingTokens"}
HELLO = pb.Message(role="user", content="hello")
CLOCK = {"type": "function", "function": {"name": "clock"}}


def request_of(options: pb.PredictOptions) -> GenerationRequest:
    return generation_request(options, SERVED)


def refusal(**changes: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        request_of(predict_options(**changes))
    return str(caught.value)


def test_the_tables_list_exactly_the_fields_that_are_read() -> None:
    read: set[str] = set()
    for options in (predict_options(), predict_options(Messages=[HELLO])):
        recorder = Recorder(options)
        request_of(recorder)  # type: ignore[arg-type]
        read |= recorder.read
    assert read | ELSEWHERE == {*PREDICT_OPTIONS.used, *PREDICT_OPTIONS.refused}
    assert not read & ELSEWHERE


def test_the_hosts_defaults_are_accepted() -> None:
    request = request_of(predict_options())
    assert request.prompt == RawPrompt("Once upon a time")
    assert request.sampling.temperature == pytest.approx(0.9)
    assert request.sampling.top_p == pytest.approx(0.95)
    assert (request.sampling.top_k, request.sampling.min_p) == (0, 0.0)
    assert request.sampling.seed == 81_985_529
    assert request.max_tokens is None
    assert request.stop == ()


def test_an_empty_message_but_for_the_prompt_means_greedy_sampling() -> None:
    request = request_of(pb.PredictOptions(Prompt="x"))
    assert request.sampling == type(request.sampling)(seed=0)


REFUSED_VALUES: dict[str, list[Any]] = {
    "TailFreeSamplingZ": [0.5, -1.0, math.nan, math.inf],
    "Mirostat": [1, 2],
    "NegativePrompt": ["sad"],
}


def test_each_refused_field_is_tested() -> None:
    assert set(REFUSED_VALUES) == set(PREDICT_OPTIONS.refused)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in REFUSED_VALUES.items() for value in values],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(name: str, value: Any) -> None:
    assert refusal(**{name: value}).startswith(name)


def test_a_large_number_is_shown_as_it_was_sent() -> None:
    assert refusal(Mirostat=2**31 - 1).startswith("Mirostat is 2147483647, but")


def test_a_message_shows_no_path_of_the_server() -> None:
    served = replace(SERVED, name="/srv/models/tiny-text")
    with pytest.raises(InvalidRequest, match="the loaded model 'tiny-text' accepts only text"):
        generation_request(predict_options(Images=["aGk="]), served)
    assert replace(SERVED, name="owner/tiny").public_name == "owner/tiny"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TailFreeSamplingZ", 1.0),
        ("MirostatETA", 0.3),
        ("MirostatTAU", 7.0),
        ("NKeep", 8),
        ("PenalizeNL", True),
        ("PromptCachePath", "/models/cache"),
        ("PromptCacheRO", True),
        ("RopeFreqBase", 1e6),
        ("NegativePromptScale", 1.0),
        ("Tools", "[]"),
        ("Tools", "null"),
        ("ToolChoice", '"auto"'),
    ],
)
def test_a_field_that_changes_nothing_is_accepted(name: str, value: Any) -> None:
    request_of(predict_options(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("Temperature", math.nan, "nan"),
        ("Temperature", math.inf, "inf"),
        ("Temperature", -0.5, "-0.5"),
        ("Temperature", 1e30, "1e+30"),
        ("TopP", math.nan, "nan"),
        ("TopP", -0.5, "-0.5"),
        ("TopP", math.inf, "inf"),
        ("MinP", 2.0, "2"),
        ("MinP", -1.0, "-1"),
        ("MinP", math.nan, "nan"),
        ("TopK", -2, "-2"),
        ("TypicalP", -1.0, "-1"),
        ("TypicalP", math.nan, "nan"),
        ("TypicalP", math.inf, "inf"),
        ("Penalty", -1.0, "-1"),
        ("Penalty", 1e-9, "1e-09"),
        ("Penalty", math.nan, "nan"),
        ("Penalty", math.inf, "inf"),
        ("Repeat", -2, "-2"),
        ("FrequencyPenalty", math.nan, "nan"),
        ("FrequencyPenalty", 1e9, "1e+09"),
        ("PresencePenalty", -math.inf, "-inf"),
        ("NDraft", -2, "-2"),
        ("Logprobs", -1, "-1"),
        ("TopLogprobs", -1, "-1"),
        ("TopLogprobs", 21, "21"),
        ("Tokens", -3, "-3"),
        ("Tokens", -(2**31), "-2147483648"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_value(name: str, value: Any, shown: str) -> None:
    assert refusal(**{name: value}).startswith(f"{name} is {shown}:")


@pytest.mark.parametrize(("sent", "meant"), [(0.0, 1.0), (1.0, 1.0), (1.7, 1.0), (0.25, 0.25)])
def test_top_p(sent: float, meant: float) -> None:
    options = pb.PredictOptions(Prompt="x", TopP=sent)
    assert request_of(options).sampling.top_p == meant


@pytest.mark.parametrize(("sent", "meant"), [(-1, 0), (0, None), (4, 4), (2**31 - 1, 64)])
def test_n_draft(sent: int, meant: int | None) -> None:
    assert request_of(pb.PredictOptions(Prompt="x", NDraft=sent)).n_draft == meant


@pytest.mark.parametrize(("sent", "meant"), [(-1, 0), (0, 0), (40, 40), (2**31 - 1, 2**31 - 1)])
def test_top_k(sent: int, meant: int) -> None:
    assert request_of(predict_options(TopK=sent)).sampling.top_k == meant


def test_temperatures_of_zero_or_nearly_zero_are_greedy() -> None:
    for value in (0.0, 1e-40, 1e-6):
        options = pb.PredictOptions(Prompt="x", Temperature=value)
        assert request_of(options).sampling.temperature == 0


@pytest.mark.parametrize(("sent", "meant"), [(0, 0), (7, 7), (-2, 2**32 - 2), (2**31 - 1,) * 2])
def test_seeds_are_used_as_given(sent: int, meant: int) -> None:
    options = pb.PredictOptions(Prompt="x", Seed=sent)
    assert request_of(options).sampling.seed == meant


def test_seed_minus_one_draws_a_fresh_seed_each_time() -> None:
    options = pb.PredictOptions(Prompt="x", Seed=-1)
    assert len({request_of(options).sampling.seed for _ in range(8)}) == 8


@pytest.mark.parametrize(("sent", "meant"), [(0, None), (-1, None), (-2, None), (5, 5)])
def test_tokens(sent: int, meant: int | None) -> None:
    assert request_of(predict_options(Tokens=sent)).max_tokens == meant


@pytest.mark.parametrize(("sent", "meant"), [(0.0, 1.0), (1.0, 1.0), (1.5, 1.5), (0.5, 0.5)])
def test_penalty(sent: float, meant: float) -> None:
    assert request_of(predict_options(Penalty=sent)).sampling.repetition == meant


@pytest.mark.parametrize(("sent", "meant"), [(0, 64), (-1, WHOLE), (7, 7)])
def test_penalty_window(sent: int, meant: int) -> None:
    assert request_of(predict_options(Repeat=sent)).sampling.window == meant


def test_additive_penalties_are_used_as_given() -> None:
    options = predict_options(FrequencyPenalty=-0.5, PresencePenalty=2)
    sampling = request_of(options).sampling
    assert (sampling.frequency, sampling.presence) == (-0.5, 2)


def test_logit_bias_is_by_token_id() -> None:
    request = request_of(predict_options(LogitBias='{"7": -100, " 511 ": 2.5}'))
    assert request.sampling.logit_bias == ((7, -100.0), (511, 2.5))
    for nothing in ("", "{}", "null", "  "):
        assert request_of(predict_options(LogitBias=nothing)).sampling.logit_bias == ()


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ("garbage", "LogitBias is not valid JSON"),
        ("[" * 100_000, "LogitBias is not valid JSON"),
        ("[1]", "LogitBias must be a JSON object"),
        ('{"x": 1}', "LogitBias has the key 'x'"),
        ('{"-1": 1}', "LogitBias has the key '-1'"),
        ('{"512": 1}', "names the token 512, but the model's vocabulary ends at 511"),
        ('{"1": "much"}', "LogitBias['1'] is 'much'"),
        ('{"1": true}', "LogitBias['1'] is True"),
        ('{"1": NaN}', "LogitBias['1'] is nan"),
        ('{"1": Infinity}', "LogitBias['1'] is inf"),
        (json.dumps(dict.fromkeys(range(10_001), 1)), "LogitBias has 10001 tokens"),
    ],
)
def test_a_wrong_bias_is_refused(bias: str, words: str) -> None:
    assert words in refusal(LogitBias=bias)


@pytest.mark.parametrize(
    ("sent", "meant"), [((0, 0), None), ((1, 0), 0), ((0, 5), 5), ((1, 1), 1), ((20, 20), 20)]
)
def test_logprobs(sent: tuple[int, int], meant: int | None) -> None:
    options = predict_options(Logprobs=sent[0], TopLogprobs=sent[1])
    assert request_of(options).logprobs == meant


def test_a_grammar_s_kind_is_detected_or_given_by_name() -> None:
    def constraint(text: str, **metadata: str) -> ConstraintSpec | None:
        options = predict_options(Grammar=text)
        options.Metadata.update({f"mlx.{key}": value for key, value in metadata.items()})
        return request_of(options).constraint

    assert constraint("") is constraint("  ") is None
    assert constraint('root ::= "a"') == ConstraintSpec("gbnf", 'root ::= "a"')
    assert constraint('{"type": "object"}') == ConstraintSpec("json_schema", '{"type": "object"}')
    assert constraint("a+", grammar_type="regex") == ConstraintSpec("regex", "a+")


def test_a_required_call_is_a_constraint() -> None:
    tools = json.dumps([CLOCK, {"type": "function", "function": {"name": "map"}}])

    def constraint(choice: str, **changes: Any) -> ConstraintSpec | None:
        return request_of(
            predict_options(Messages=[HELLO], Tools=tools, ToolChoice=choice, **changes)
        ).constraint

    assert constraint("auto") is constraint("none") is None
    required = constraint("required")
    assert required is not None
    assert [tool["function"]["name"] for tool in required.tools] == ["clock", "map"]
    assert required.parallel
    named = constraint('{"type": "function", "function": {"name": "clock"}}')
    assert named == ConstraintSpec("calls", tools=(CLOCK,), parallel=False)
    assert constraint("required", Grammar='root ::= "a"') == ConstraintSpec("gbnf", 'root ::= "a"')


def test_a_strict_tool_constrains_only_the_calls_that_are_made() -> None:
    strict = {"type": "function", "function": {"name": "clock", "strict": True}}

    def constraint(tool: Any, choice: str) -> ConstraintSpec | None:
        tools = json.dumps([tool])
        options = predict_options(Messages=[HELLO], Tools=tools, ToolChoice=choice)
        return request_of(options).constraint

    assert constraint(strict, "auto") == ConstraintSpec("calls", tools=(strict,), optional=True)
    assert constraint(strict, "required") == ConstraintSpec("calls", tools=(strict,))
    assert constraint(strict, "none") is None
    loose = {"type": "function", "function": {"name": "clock", "strict": False}}
    assert constraint(loose, "auto") is None


def test_a_response_format_may_apply_beside_calls() -> None:
    spec = ConstraintSpec("json_schema", "{}")

    def constraint(choice: str, tools: tuple[Any, ...] = (CLOCK,)) -> ConstraintSpec | None:
        options = predict_options(
            Messages=[HELLO], Tools=json.dumps(tools), ToolChoice=choice, Grammar="{}"
        )
        options.Metadata["mlx.grammar_or_calls"] = "true"
        return request_of(options).constraint

    assert constraint("auto") == ConstraintSpec("calls", tools=(CLOCK,), optional=True, answer=spec)
    assert constraint("required") == ConstraintSpec("calls", tools=(CLOCK,))
    assert constraint("none") == constraint("auto", ()) == spec


def test_metadata_overrides_the_models_defaults() -> None:
    options = predict_options(Tokens=50)
    options.Metadata.update(
        {"mlx.min_tokens": "7", "mlx.xtc_probability": "0.5", "mlx.xtc_threshold": "0.2"}
    )
    options.Metadata.update({"mlx.presence_window": "20", "mlx.frequency_window": "30"})
    options.Metadata["mlx.stop_token_ids"] = "[2, 7]"
    defaults = Extras(min_tokens=1, xtc_probability=0.1, xtc_threshold=0.3)
    request = generation_request(options, replace(SERVED, defaults=defaults))
    assert request.min_tokens == 7
    assert request.stop_tokens == {2, 7}
    assert request.sampling.xtc_probability == 0.5
    assert request.sampling.xtc_threshold == 0.2
    assert (request.sampling.presence_window, request.sampling.frequency_window) == (20, 30)
    request = generation_request(predict_options(), replace(SERVED, defaults=defaults))
    assert (request.min_tokens, request.sampling.xtc_probability) == (1, 0.1)


def test_the_models_least_tokens_give_way_to_the_limit_of_an_answer() -> None:
    """A request did not send them, so they cannot be what is wrong with it."""
    served = replace(SERVED, defaults=Extras(min_tokens=100))
    assert generation_request(predict_options(Tokens=10), served).min_tokens == 10
    assert generation_request(predict_options(Tokens=0), served).min_tokens == 100
    short = replace(served, default_max_tokens=20)
    assert generation_request(predict_options(Tokens=0), short).min_tokens == 20
    options = predict_options(Tokens=0, Metadata={"mlx.min_tokens": "30"})
    with pytest.raises(InvalidRequest, match="is 30, but the model's max_tokens is 20"):
        generation_request(options, short)
    options.Tokens = 20
    with pytest.raises(InvalidRequest) as refused:
        generation_request(options, served)
    assert refused.value.fields == ("Metadata mlx.min_tokens", "Tokens")
    assert written(refused.value.message, str.upper).count("TOKENS is 20") == 1


def test_an_answer_to_continue_is_the_last_message() -> None:
    goes_on = {"mlx.continue_final_message": "true"}
    begun = pb.Message(role="assistant", content="It is")
    prompt = request_of(predict_options(Messages=[HELLO, begun], Metadata=goes_on)).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.continues
    called = pb.Message(role="assistant", content="It is", tool_calls="[]")
    for last in (HELLO, pb.Message(role="assistant"), called):
        words = refusal(Messages=[HELLO, last], Metadata=goes_on)
        assert words.startswith("Messages[1] cannot be continued")
    assert "there are no Messages" in refusal(Metadata=goes_on)
    ids = {"mlx.prompt_token_ids": "[1]"}
    assert "there are no Messages" in refusal(Prompt="", Metadata=goes_on | ids)
    turns = {"Messages": [HELLO, begun], "Metadata": goes_on}
    assert refusal(Grammar='root ::= "a"', **turns).startswith(
        "the grammar cannot constrain an answer"
    )
    tools = json.dumps([CLOCK])
    assert refusal(Tools=tools, ToolChoice='"required"', **turns).startswith("tool calls cannot")
    assert request_of(predict_options(Tools=tools, **turns)).constraint is None


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("mlx.min_token", "1", "key 'mlx.min_token'; did you mean 'mlx.min_tokens'?"),
        ("mlx.zzz", "1", "unknown Metadata key 'mlx.zzz': use one of mlx.adapter, mlx.audio_"),
        ("mlx.min_tokens", "-1", "Metadata mlx.min_tokens is '-1': send a whole number"),
        ("mlx.min_tokens", "9" * 5000, "send a whole number"),
        ("mlx.stop_token_ids", "[2.5]", "send a JSON list of token ids"),
        ("mlx.stop_token_ids", "[1, 512]", "mlx.stop_token_ids[1] is 512, but the vocabulary"),
        ("mlx.stop_token_ids", "[-1]", "mlx.stop_token_ids[0] is -1, but the vocabulary ends at"),
        ("mlx.min_tokens", "51", "Metadata mlx.min_tokens is 51, but Tokens is 50"),
        ("mlx.xtc_probability", "nan", "send a number from 0 to 1"),
        ("mlx.xtc_threshold", "2", "send a number from 0 to 1"),
        ("mlx.grammar_type", "bnf", "send one of auto, gbnf, json_schema, lark, regex"),
        ("mlx.parallel_tool_calls", "1", "send true or false"),
    ],
)
def test_a_wrong_extra_is_refused(key: str, value: str, words: str) -> None:
    assert words in refusal(Tokens=50, Metadata={key: value})


def test_empty_and_repeated_stop_strings_are_dropped() -> None:
    request = request_of(predict_options(StopPrompts=["", "a", "b", "a", ""]))
    assert request.stop == ("a", "b")


def test_extreme_stop_strings_are_refused() -> None:
    many = [str(number) for number in range(requests.MOST_STOPS + 1)]
    assert refusal(StopPrompts=many).startswith("StopPrompts has 65 entries")
    long = "é" * (requests.LONGEST_STOP // 2) + "x"
    assert refusal(StopPrompts=["", long]).startswith("StopPrompts[1] has 4097 bytes")


def _offered(choice: str) -> Any:
    tools = json.dumps([CLOCK])
    options = predict_options(Messages=[HELLO], Tools=tools, ToolChoice=choice)
    prompt = request_of(options).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.tools


def test_tools_reach_the_template_unless_tool_choice_is_none() -> None:
    assert _offered("") == _offered("auto") == _offered('"auto"') == (CLOCK,)
    assert _offered("none") is _offered('"none"') is None


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ("{", "", "Tools is not valid JSON"),
        ('[{"type": "function"}]', "", "Tools[0] has no function"),
        (json.dumps([CLOCK]), "7", "ToolChoice is '7'"),
        (json.dumps([CLOCK]), '{"type": "function", "name": "x"}', "ToolChoice names 'x'"),
        ("", '"required"', "Tools is empty"),
    ],
)
def test_unusable_tools_are_refused(tools: str, choice: str, words: str) -> None:
    assert words in refusal(Messages=[HELLO], Tools=tools, ToolChoice=choice)


def test_messages_win_over_the_prompt_if_the_template_is_used() -> None:
    request = request_of(predict_options(Prompt="joined text", Messages=[HELLO]))
    assert request.prompt == ChatPrompt(({"role": "user", "content": "hello"},), None, {})


def test_the_prompt_is_used_without_the_template_or_without_messages() -> None:
    for options in (
        pb.PredictOptions(Prompt="p", Messages=[HELLO]),
        pb.PredictOptions(Prompt="p", UseTokenizerTemplate=True),
    ):
        assert request_of(options).prompt == RawPrompt("p")


def test_a_request_without_prompt_and_messages_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="UseTokenizerTemplate"):
        request_of(pb.PredictOptions(Messages=[HELLO]))
    for options in (pb.PredictOptions(), pb.PredictOptions(UseTokenizerTemplate=True)):
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            request_of(options)


def test_unreadable_tool_calls_name_the_message() -> None:
    messages = [HELLO, pb.Message(role="assistant", tool_calls="{")]
    assert "Messages[1].tool_calls" in refusal(Messages=messages)


def test_a_clients_label_is_prefixed_to_the_request_id_if_it_is_harmless() -> None:
    assert request_of(predict_options(CorrelationId="job-7")).request_id.startswith("job-7.")
    assert "secret" not in request_of(predict_options(CorrelationId="a secret")).request_id


def arguments(**metadata: str) -> dict[str, Any]:
    return template_arguments(metadata)


def test_thinking_and_effort_become_template_arguments() -> None:
    assert arguments(enable_thinking="false") == {"enable_thinking": False}
    assert arguments(enable_thinking="True", reasoning_effort="low") == {
        "enable_thinking": True,
        "reasoning_effort": "low",
    }


def test_labels_of_clients_have_no_effect() -> None:
    assert arguments(user="7", tools="x", session="y") == {}


def test_explicit_keys_win_over_the_blob() -> None:
    blob = json.dumps({"enable_thinking": True, "style": "dry", "reasoning_effort": "high"})
    merged = arguments(chat_template_kwargs=blob, enable_thinking="false")
    assert merged == {"enable_thinking": False, "style": "dry", "reasoning_effort": "high"}


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_the_blob_cannot_override_rendering_arguments(name: str) -> None:
    blob = json.dumps({name: "x"})
    with pytest.raises(InvalidRequest, match=name):
        arguments(chat_template_kwargs=blob)
    # The host copies a client's labels into the blob; a copied label is no attempt to override.
    assert template_arguments({"chat_template_kwargs": blob, name: "x"}) == {}


@pytest.mark.parametrize("blob", ["{", "[]", "7", '"x"', "[" * 100_000, "{" + " " * 70_000 + "}"])
def test_a_blob_that_is_not_an_object_is_refused(blob: str) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
        arguments(chat_template_kwargs=blob)


@pytest.mark.parametrize("value", ["maybe", "1"])
def test_thinking_is_true_or_false(value: str) -> None:
    with pytest.raises(InvalidRequest, match="enable_thinking must be true or false"):
        arguments(enable_thinking=value)


@pytest.mark.parametrize(
    ("metadata", "words", "budget"),
    [
        ({}, (), None),
        ({"mlx.thinking_budget": "7", "reasoning_effort": "low"}, (), 7),
        ({"mlx.thinking_budget": "-1", "reasoning_effort": "low"}, (), None),
        ({"reasoning_effort": "low"}, (), 1024),
        ({"reasoning_effort": "low"}, ("reasoning_effort",), None),
        ({"reasoning_effort": "max"}, (), None),
        ({"chat_template_kwargs": '{"thinking_budget": 9}'}, ("thinking_budget",), 9),
        ({"chat_template_kwargs": '{"reasoning_effort": "medium"}'}, (), 8192),
    ],
    ids=str,
)
def test_thinking_budget(
    metadata: dict[str, str], words: tuple[str, ...], budget: int | None
) -> None:
    served = replace(SERVED, template_words=frozenset(words))
    request = generation_request(predict_options(Messages=[HELLO], Metadata=metadata), served)
    assert request.thinking_budget == budget
    default = replace(served, defaults=Extras(thinking_budget=3))
    request = generation_request(predict_options(Messages=[HELLO], Metadata=metadata), default)
    silent = "mlx.thinking_budget" not in metadata and budget is None
    assert request.thinking_budget == (3 if silent and "max" not in str(metadata) else budget)


def test_a_template_gets_the_budget_under_its_own_argument_name() -> None:
    served = replace(SERVED, template_words=frozenset({"thinking_budget"}))
    for most, variables in (("0", {"enable_thinking": False}), ("7", {})):
        options = predict_options(Messages=[HELLO], Metadata={"mlx.thinking_budget": most})
        prompt = generation_request(options, served).prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.template_arguments == {"thinking_budget": int(most), **variables}
        options.Metadata["enable_thinking"] = "true"
        prompt = generation_request(options, SERVED).prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.template_arguments == {"enable_thinking": True}


HOST_GRAMMAR = 'root ::= "{" "\\"arguments\\": {}, \\"name\\": \\"clock\\"" "}"'
STRICT_CLOCK = {"type": "function", "function": {"name": "clock", "strict": True}}


@pytest.mark.parametrize(
    ("choice", "optional"),
    [
        ("", True),
        ('"auto"', True),
        *(
            (spelling, False)
            for spelling in (
                "required",
                '"required"',
                '"Required"',
                '"any"',
                '{"type": "any"}',
                '{"type": "Required"}',
                '{"mode": "required"}',
                '{"type": "function", "function": {"name": "required"}}',
                '{"type": "function", "name": "required"}',
                json.dumps('{"type": "function", "function": {"name": "required"}}'),
            )
        ),
    ],
)
def test_strict_tools_are_enforced_beside_a_hosts_own_grammar(choice: str, optional: bool) -> None:
    fields = {"Messages": [HELLO], "Tools": json.dumps([STRICT_CLOCK]), "ToolChoice": choice}
    request = request_of(predict_options(**fields, Grammar=HOST_GRAMMAR))
    assert request.constraint == ConstraintSpec("calls", tools=(STRICT_CLOCK,), optional=optional)


def test_other_grammars_replace_the_tool_constraint() -> None:
    fields: dict[str, Any] = {"Messages": [HELLO], "ToolChoice": "required"}
    strict, free = json.dumps([STRICT_CLOCK]), json.dumps([CLOCK])
    for tools, grammar, choice in (
        (free, HOST_GRAMMAR, ""),
        (strict, '{"type": "object"}', ""),
        (strict, HOST_GRAMMAR, "none"),
    ):
        sent = predict_options(
            **fields | {"Tools": tools, "Grammar": grammar, "ToolChoice": choice}
        )
        constraint = request_of(sent).constraint
        assert constraint is not None
        assert constraint.kind != "calls"
    required = {"type": "function", "function": {"name": "required", "strict": True}}
    choice = json.dumps({"type": "function", "function": {"name": "required"}})
    tools = json.dumps([STRICT_CLOCK, required])
    constraint = request_of(
        predict_options(**fields | {"Tools": tools, "ToolChoice": choice})
    ).constraint
    assert constraint == ConstraintSpec("calls", tools=(required,), parallel=False)


def test_a_request_chooses_an_adapter_that_the_model_has() -> None:
    served = replace(SERVED, adapters={"sql": 1, "french": 2})
    options = predict_options(Metadata={"mlx.adapter": "sql"})
    assert generation_request(options, served).adapter == "sql"
    assert generation_request(predict_options(), served).adapter == ""
    unknown = predict_options(Metadata={"mlx.adapter": "sqll"})
    with pytest.raises(InvalidRequest, match=r"mlx.adapter is 'sqll'.*did you mean 'sql'"):
        generation_request(unknown, served)
    with pytest.raises(InvalidRequest, match="the model has none, because its option adapters"):
        generation_request(options, SERVED)
    stored = predict_options(Metadata={"mlx.adapter": "sql"}, PromptCachePath="/tmp/a")
    with pytest.raises(InvalidRequest, match="PromptCachePath are both given"):
        generation_request(stored, served)
