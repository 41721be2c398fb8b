"""Thinking budgets on the real process, with a model that thinks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.acceptance.backend import WAIT, Backend, chat, refusal
from tests.rpc.localai_host import Seen, streamed, unary
from wire import backend_pb2 as pb

SUM = "What is 7 plus 5?"
FORM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}


def _ask(**metadata: Any) -> pb.PredictOptions:
    return chat(SUM, Metadata={key.replace("__", "."): str(v) for key, v in metadata.items()})


def _streamed(backend: Backend, request: pb.PredictOptions) -> Seen:
    return unary(backend.stub.Predict(request, timeout=WAIT), tools=False)


def _thought(backend: Backend, request: pb.PredictOptions) -> int:
    _, call = backend.stub.Predict.with_call(request, timeout=WAIT)
    return int(dict(call.trailing_metadata())["mlx-reasoning-tokens"])


def test_a_budget_ends_the_reasoning_and_an_answer_follows(served: Backend) -> None:
    free = _thought(served, _ask(enable_thinking="true"))
    assert free > 8
    for most in (2, 3, 7):
        request = _ask(enable_thinking="true", mlx__thinking_budget=most)
        assert 0 < _thought(served, request) <= most + 1  # including the tag
        whole = _streamed(served, request)
        pieces = streamed(served.stub.PredictStream(request, timeout=WAIT), tools=False)
        for seen in (whole, pieces):
            assert seen.content
            assert "think>" not in seen.content + seen.reasoning
        assert (whole.content, whole.reasoning) == (pieces.content, pieces.reasoning)
    for most in (free, 5000, -1):
        request = _ask(enable_thinking="true", mlx__thinking_budget=most)
        assert _thought(served, request) == free


def test_a_budget_of_zero_means_no_reasoning(served: Backend) -> None:
    for metadata in ({}, {"enable_thinking": "true"}, {"reasoning_effort": "none"}):
        request = _ask(**{"mlx__thinking_budget": 0, **metadata})
        seen = _streamed(served, request)
        assert seen.reasoning == ""
        assert seen.content


def test_an_effort_becomes_a_budget_if_the_template_does_not_use_it(bare: Backend) -> None:
    bare.load(Options=["thinking_budget:3"])
    seen = _streamed(bare, _ask(enable_thinking="true"))
    long = _streamed(bare, _ask(enable_thinking="true", reasoning_effort="low"))
    own = _streamed(bare, _ask(enable_thinking="true", mlx__thinking_budget=-1))
    none = _streamed(bare, _ask(reasoning_effort="none"))
    assert 0 < len(seen.reasoning) < len(long.reasoning)
    assert long.reasoning == own.reasoning
    assert none.reasoning == ""


@pytest.mark.parametrize("most", [0, 2, 500])
def test_a_grammar_holds_after_reasoning_that_a_budget_ended(served: Backend, most: int) -> None:
    request = _ask(enable_thinking="true", mlx__thinking_budget=most)
    request.Grammar = json.dumps(FORM)
    seen = _streamed(served, request)
    assert isinstance(json.loads(seen.content)["sum"], int)


def test_a_budget_needs_a_parsed_chat_answer(served: Backend) -> None:
    request = pb.PredictOptions(Prompt="Hi", Metadata={"mlx.thinking_budget": "5"})
    assert "only in an answer to Messages" in refusal(served, request)
    request = _ask(mlx__thinking_budget="much")
    assert "send a whole number from -1" in refusal(served, request)
