"""Every field of PredictOptions is read, refused by name, or listed as meaningless."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from backend.engine.errors import InvalidRequest
from backend.engine.request import ChatPrompt, RawPrompt
from backend.rpc import requests, template_arguments
from backend.rpc.request_fields import REFUSED, UNUSED
from backend.rpc.requests import generation_request
from tests.rpc.recorder import Recorder
from tests.rpc.requests_of_hosts import predict_options
from wire import backend_pb2 as pb

HELLO = pb.Message(role="user", content="hello")
CLOCK = {"type": "function", "function": {"name": "clock"}}


def refusal(**changes: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        generation_request(predict_options(**changes))
    return str(caught.value)


def test_every_field_has_exactly_one_place() -> None:
    fields = {field.name for field in pb.PredictOptions.DESCRIPTOR.fields}
    read: set[str] = set()
    for options in (predict_options(), predict_options(Messages=[HELLO])):
        recorder = Recorder(options)
        generation_request(recorder)  # type: ignore[arg-type]
        read |= recorder.read
    assert set(UNUSED) & read == set()
    assert read | set(UNUSED) == fields
    assert set(REFUSED) <= read
    assert all(why.strip() for why in UNUSED.values())


def test_the_hosts_defaults_are_accepted() -> None:
    request = generation_request(predict_options())
    assert request.prompt == RawPrompt("Once upon a time")
    assert request.sampling.temperature == pytest.approx(0.9)
    assert request.sampling.top_p == pytest.approx(0.95)
    assert (request.sampling.top_k, request.sampling.min_p) == (0, 0.0)
    assert request.sampling.seed == 81_985_529
    assert request.max_tokens is None
    assert request.stop == ()


def test_an_empty_message_of_options_but_for_the_prompt_is_greedy() -> None:
    request = generation_request(pb.PredictOptions(Prompt="x"))
    assert request.sampling == type(request.sampling)(seed=0)


REFUSED_VALUES: dict[str, list[Any]] = {
    "Penalty": [1.1, -1.0, math.nan, math.inf],
    "FrequencyPenalty": [0.5, -0.5, math.nan],
    "PresencePenalty": [1.5, -2.0, math.nan],
    "LogitBias": ['{"1": -100}', "garbage"],
    "Grammar": ['root ::= "a"'],
    "Logprobs": [1, -1],
    "TopLogprobs": [5, -1],
    "TypicalP": [0.5, -1.0, math.nan, math.inf],
    "TailFreeSamplingZ": [0.5, -1.0, math.nan, math.inf],
    "Mirostat": [1, 2],
    "NegativePrompt": ["sad"],
    "Images": [["aGk="]],
    "Videos": [["aGk="]],
    "Audios": [["aGk="]],
}


def test_each_refused_field_is_tried() -> None:
    assert set(REFUSED_VALUES) == set(REFUSED)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in REFUSED_VALUES.items() for value in values],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(name: str, value: Any) -> None:
    assert refusal(**{name: value}).startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Penalty", 1.0),
        ("LogitBias", "{}"),
        ("TypicalP", 1.0),
        ("TailFreeSamplingZ", 1.0),
        ("MirostatETA", 0.3),
        ("MirostatTAU", 7.0),
        ("Repeat", 64),
        ("NDraft", 16),
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
    generation_request(predict_options(**{name: value}))


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
        ("Tokens", -3, "-3"),
        ("Tokens", -(2**31), "-2147483648"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_value(name: str, value: Any, shown: str) -> None:
    assert refusal(**{name: value}).startswith(f"{name} is {shown}:")


@pytest.mark.parametrize(("sent", "meant"), [(0.0, 1.0), (1.0, 1.0), (1.7, 1.0), (0.25, 0.25)])
def test_top_p(sent: float, meant: float) -> None:
    options = pb.PredictOptions(Prompt="x", TopP=sent)
    assert generation_request(options).sampling.top_p == meant


@pytest.mark.parametrize(("sent", "meant"), [(-1, 0), (0, 0), (40, 40), (2**31 - 1, 2**31 - 1)])
def test_top_k(sent: int, meant: int) -> None:
    assert generation_request(predict_options(TopK=sent)).sampling.top_k == meant


def test_zero_and_next_to_zero_temperatures_are_greedy() -> None:
    for value in (0.0, 1e-40, 1e-6):
        options = pb.PredictOptions(Prompt="x", Temperature=value)
        assert generation_request(options).sampling.temperature == 0


@pytest.mark.parametrize(("sent", "meant"), [(0, 0), (7, 7), (-2, 2**32 - 2), (2**31 - 1,) * 2])
def test_seeds_are_taken_as_they_are(sent: int, meant: int) -> None:
    options = pb.PredictOptions(Prompt="x", Seed=sent)
    assert generation_request(options).sampling.seed == meant


def test_minus_one_draws_a_fresh_seed_each_time() -> None:
    options = pb.PredictOptions(Prompt="x", Seed=-1)
    assert len({generation_request(options).sampling.seed for _ in range(8)}) == 8


@pytest.mark.parametrize(("sent", "meant"), [(0, None), (-1, None), (-2, None), (5, 5)])
def test_tokens(sent: int, meant: int | None) -> None:
    assert generation_request(predict_options(Tokens=sent)).max_tokens == meant


def test_empty_and_repeated_stop_strings_are_dropped() -> None:
    request = generation_request(predict_options(StopPrompts=["", "a", "b", "a", ""]))
    assert request.stop == ("a", "b")


def test_absurd_stop_strings_are_refused() -> None:
    many = [str(number) for number in range(requests.MOST_STOPS + 1)]
    assert refusal(StopPrompts=many).startswith("StopPrompts has 65 entries")
    long = "é" * (requests.LONGEST_STOP // 2) + "x"
    assert refusal(StopPrompts=["", long]).startswith("StopPrompts[1] is 4097 bytes")


def _offered(choice: str) -> Any:
    tools = json.dumps([CLOCK])
    options = predict_options(Messages=[HELLO], Tools=tools, ToolChoice=choice)
    prompt = generation_request(options).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.tools


def test_tools_reach_the_template_unless_they_are_declined() -> None:
    assert _offered("") == _offered("auto") == _offered('"auto"') == (CLOCK,)
    assert _offered("none") is _offered('"none"') is None


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ("{", "", "Tools is not valid JSON"),
        ('[{"type": "function"}]', "", "Tools[0] has no function"),
        (json.dumps([CLOCK]), "7", "ToolChoice is '7'"),
        (json.dumps([CLOCK]), '{"type": "function", "name": "x"}', "ToolChoice names 'x'"),
        (json.dumps([CLOCK]), '"required"', "cannot force a call"),
        ("", '"required"', "Tools is empty"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(tools: str, choice: str, words: str) -> None:
    assert words in refusal(Messages=[HELLO], Tools=tools, ToolChoice=choice)


def test_messages_win_over_the_prompt_with_the_template() -> None:
    request = generation_request(predict_options(Prompt="joined text", Messages=[HELLO]))
    assert request.prompt == ChatPrompt(({"role": "user", "content": "hello"},), None, {})


def test_the_prompt_serves_without_the_template_or_without_messages() -> None:
    for options in (
        pb.PredictOptions(Prompt="p", Messages=[HELLO]),
        pb.PredictOptions(Prompt="p", UseTokenizerTemplate=True),
    ):
        assert generation_request(options).prompt == RawPrompt("p")


def test_nothing_to_say_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="UseTokenizerTemplate"):
        generation_request(pb.PredictOptions(Messages=[HELLO]))
    for options in (pb.PredictOptions(), pb.PredictOptions(UseTokenizerTemplate=True)):
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            generation_request(options)


def test_unreadable_tool_calls_name_the_message() -> None:
    messages = [HELLO, pb.Message(role="assistant", tool_calls="{")]
    assert "Messages[1].tool_calls" in refusal(Messages=messages)


def test_a_clients_label_leads_the_request_id_if_it_is_only_a_label() -> None:
    assert generation_request(predict_options(CorrelationId="job-7")).request_id.startswith(
        "job-7."
    )
    assert "secret" not in generation_request(predict_options(CorrelationId="a secret")).request_id


def arguments(**metadata: str) -> dict[str, Any]:
    return template_arguments.of(metadata)


def test_thinking_and_effort_become_template_arguments() -> None:
    assert arguments(enable_thinking="false") == {"enable_thinking": False}
    assert arguments(enable_thinking="True", reasoning_effort="low") == {
        "enable_thinking": True,
        "reasoning_effort": "low",
    }


def test_labels_of_clients_mean_nothing() -> None:
    assert arguments(user="7", tools="x", session="y") == {}


def test_explicit_keys_win_over_the_blob() -> None:
    blob = json.dumps({"enable_thinking": True, "style": "dry", "reasoning_effort": "high"})
    merged = arguments(chat_template_kwargs=blob, enable_thinking="false")
    assert merged == {"enable_thinking": False, "style": "dry", "reasoning_effort": "high"}


@pytest.mark.parametrize("name", sorted(template_arguments.RESERVED))
def test_the_blob_cannot_take_over_the_rendering(name: str) -> None:
    blob = json.dumps({name: "x"})
    with pytest.raises(InvalidRequest, match=name):
        arguments(chat_template_kwargs=blob)
    # The host copies a client's labels into the blob: a copy is no attempt.
    assert template_arguments.of({"chat_template_kwargs": blob, name: "x"}) == {}


@pytest.mark.parametrize("blob", ["{", "[]", "7", '"x"', "[" * 100_000, "{" + " " * 70_000 + "}"])
def test_a_blob_that_is_no_object_is_refused(blob: str) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
        arguments(chat_template_kwargs=blob)


@pytest.mark.parametrize("value", ["maybe", "1"])
def test_thinking_is_true_or_false(value: str) -> None:
    with pytest.raises(InvalidRequest, match="enable_thinking must be true or false"):
        arguments(enable_thinking=value)
