"""Completions from end to end, above all as lm-eval uses them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.asking import VOCABULARY, chunks, complete, refusal
from tests.gateway.gateway_process import GatewayProcess

PATH = "/v1/completions"
COUNT = "1 2 3 4"
COUNT_TOKENS = [VOCABULARY[token] for token in ["1", "Ġ", "2", "Ġ", "3", "Ġ", "4"]]


def test_a_text_is_continued(gateway: GatewayProcess) -> None:
    whole = complete(gateway, prompt=COUNT, max_tokens=6)
    assert whole["object"] == "text_completion"
    assert whole["id"].startswith("cmpl-")
    (choice,) = whole["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 6
    assert complete(gateway, prompt=COUNT)["usage"]["completion_tokens"] == 16  # OpenAI's default


def test_a_prompt_of_tokens_equals_its_text(gateway: GatewayProcess) -> None:
    text = complete(gateway, prompt=COUNT)
    tokens = complete(gateway, prompt=COUNT_TOKENS)
    assert tokens["choices"] == text["choices"]
    assert tokens["usage"]["prompt_tokens"] == len(COUNT_TOKENS)
    assert complete(gateway, prompt=[0, 1])["usage"]["prompt_tokens"] == 2  # 0 is one too
    both = complete(gateway, prompt=[COUNT_TOKENS, [VOCABULARY["1"]]], max_tokens=4)
    assert both["choices"][0]["text"] == text["choices"][0]["text"][:4]
    mixed = complete(gateway, prompt=[COUNT_TOKENS, COUNT])["choices"]
    assert [choice["text"] for choice in mixed] == [text["choices"][0]["text"]] * 2


def test_a_list_of_prompts_with_n_is_answered_in_order(gateway: GatewayProcess) -> None:
    asked: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 8}
    prompts = ["1 2 3", "7 8 9"]
    whole = complete(gateway, prompt=prompts, n=2, **asked)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    alone = [
        complete(gateway, prompt=prompt, **{**asked, "seed": seed})
        for prompt in prompts
        for seed in (5, 6)
    ]
    assert [c["text"] for c in whole["choices"]] == [one["choices"][0]["text"] for one in alone]
    answer = sum(one["usage"]["completion_tokens"] for one in alone)
    assert whole["usage"]["prompt_tokens"] == 10  # each prompt once
    assert whole["usage"]["completion_tokens"] == answer


def harness(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """What lm-eval's local-completions computes from a choice (its parse_logprobs)."""
    logprobs = choice["logprobs"]
    tokens = logprobs["token_logprobs"][context:-1]
    greedy = all(
        token == max(top.values())
        for token, top in zip(tokens, logprobs["top_logprobs"][context:-1], strict=True)
    )
    return sum(tokens), greedy


def test_echo_with_logprobs_scores_as_lm_eval_expects(
    gateway: GatewayProcess,
) -> None:
    likely, unlikely = [*COUNT_TOKENS, 0, 0], [*COUNT_TOKENS, 0, 0]
    likely[-2:] = [VOCABULARY["Ġ"], VOCABULARY["5"]]
    unlikely[-2:] = [VOCABULARY["Ġ"], VOCABULARY["a"]]
    asked: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
    whole = complete(gateway, prompt=[likely, unlikely], **asked)
    good, bad = (harness(choice, len(COUNT_TOKENS)) for choice in whole["choices"])
    assert good[1]
    assert not bad[1]
    assert bad[0] < good[0] < 0
    for choice in whole["choices"]:
        lists = choice["logprobs"]
        assert {len(entries) for entries in lists.values()} == {len(likely) + 1}
        assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
        assert "".join(lists["tokens"]) == choice["text"]
        offsets = [len("".join(lists["tokens"][:place])) for place in range(len(lists["tokens"]))]
        assert lists["text_offset"] == offsets
    # The same if only the prompt is scored, and no continuation is needed.
    alone = complete(gateway, prompt=[likely], **{**asked, "max_tokens": 0})
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        whole["choices"][0]["logprobs"]["token_logprobs"][:-1], nan_ok=True
    )
    assert alone["choices"][0]["finish_reason"] == "length"
    assert alone["usage"]["completion_tokens"] == 0


def test_an_answer_that_ends_at_once_still_has_one_token(gateway: GatewayProcess) -> None:
    ended = VOCABULARY["<|im_end|>"]
    asked: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1}
    whole = complete(gateway, prompt=COUNT, logit_bias={str(ended): 100}, **asked)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == len(COUNT_TOKENS) + 1
    other = complete(gateway, prompt=COUNT, **asked)["choices"][0]
    assert harness(choice, 3)[0] == pytest.approx(harness(other, 3)[0], rel=1e-4)


@pytest.mark.parametrize("prompt", [COUNT, COUNT_TOKENS], ids=["text", "tokens"])
def test_echo_returns_the_prompt_first(gateway: GatewayProcess, prompt: Any) -> None:
    plain = complete(gateway, prompt=prompt, max_tokens=4)["choices"][0]["text"]
    assert complete(gateway, prompt=prompt, max_tokens=4, echo=True)["choices"][0]["text"] == (
        COUNT + plain
    )


@pytest.mark.parametrize(
    "fields",
    [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 0, "n": 2, "temperature": 1}],
    ids=str,
)
def test_a_stream_adds_up_to_the_unary_answer(
    gateway: GatewayProcess, fields: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"prompt": COUNT, "max_tokens": 6, "seed": 3, **fields}
    whole = complete(gateway, **asked)
    body = {"model": "tiny", "temperature": 0, **asked, "stream_options": {"include_usage": True}}
    pieces = chunks(gateway, PATH, body)
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for index, choice in enumerate(whole["choices"]):
        own = [c for chunk in pieces for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own][-1] == choice["finish_reason"]
        parts = [c["logprobs"] for c in own if c["logprobs"] is not None]
        for name, entries in (choice["logprobs"] or {}).items():
            streamed = [entry for part in parts for entry in part[name]]
            if name in ("tokens", "text_offset"):
                assert streamed == entries
            assert len(streamed) == len(entries)


def test_a_response_format_applies_to_a_completion(gateway: GatewayProcess) -> None:
    answer = complete(gateway, prompt=COUNT, guided_regex="[a-c]{3}")["choices"][0]
    assert set(answer["text"]) <= set("abc")
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt[1]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [[1], 2]}, "prompt[1]"),
        ({"prompt": ["a", [1, -2]]}, "prompt[1][1]"),
        ({"prompt": [100_000]}, "prompt[0]"),
        ({"prompt": [[1, 2], [100_000]]}, "prompt[1][0]"),
        ({"prompt": ["a", [1, 100_000]], "n": 2, "seed": 1}, "prompt[1][1]"),
        ({"prompt": "word " * 4000}, "prompt"),
        ({"prompt": ["a", "word " * 4000]}, "prompt[1]"),
        ({}, "prompt"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "messages": [{}]}, "messages"),
        ({"prompt": ["x"] * 2048, "n": 128}, "n"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_requests_are_refused(
    strict_gateway: GatewayProcess, fields: dict[str, Any], param: str
) -> None:
    error = refusal(strict_gateway, PATH, **fields)
    assert error["param"] == param, error
