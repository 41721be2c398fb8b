"""What LocalAI's clients receive of answers with reasoning, calls and quotations."""

from __future__ import annotations

import json

import pytest

from tests.rpc.fake_engine import FakeEngine, Script
from tests.rpc.localai_host import streamed, unary
from tests.rpc.requests_of_hosts import predict_options
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

THOUGHT = "<think>\nThe user greets.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {"zone": "\\u4f60 <think>"}}\n</tool_call>'

ANSWERS = {
    "plain": ("Hello there.", "Hello there.", "", 0),
    "thought": (THOUGHT + "Hello.", "Hello.", "The user greets.", 0),
    "call": (CALL, "", "", 1),
    "thought, text and calls": (
        THOUGHT + "One moment.\n" + CALL + "\n" + OTHER,
        "One moment.",
        "The user greets.",
        2,
    ),
    "characters": ("😀 你好 — ça va?", "😀 你好 — ça va?", "", 0),
}


def _request(*, tools: bool) -> pb.PredictOptions:
    offered = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    return predict_options(
        Prompt="joined by the host",
        Messages=[pb.Message(role="user", content="Hi")],
        Tools=json.dumps(offered) if tools else "",
    )


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_the_client_gets_every_part_once_and_in_the_right_place(
    stub: BackendStub, engine: FakeEngine, name: str, size: int
) -> None:
    text, content, reasoning, calls = ANSWERS[name]
    engine.script = Script([text[at : at + size] for at in range(0, len(text), size)])
    tools = calls > 0
    stream = streamed(stub.PredictStream(_request(tools=tools)), tools=tools)
    whole = unary(stub.Predict(_request(tools=tools)), tools=tools)
    for seen in (stream, whole):
        assert (seen.content, seen.reasoning) == (content, reasoning)
        assert [called for called, _ in seen.calls] == ["clock"] * calls
        assert all(json.loads(arguments) for _, arguments in seen.calls)
        assert not seen.invented
        assert not seen.retried
        assert seen.tokens == len(engine.script.pieces)


def test_a_stream_sends_nothing_for_text_that_is_still_withheld(
    stub: BackendStub, engine: FakeEngine
) -> None:
    engine.script = Script(list(THOUGHT + "Hello."))
    seen = streamed(stub.PredictStream(_request(tools=False)), tools=False)
    assert seen.empty_chunks == 1  # the totals at the end


def test_an_answer_that_never_leaves_its_reasoning_shows_none_of_it_as_content(
    stub: BackendStub, engine: FakeEngine
) -> None:
    engine.script = Script(["<think>\nOn and", " on"])
    seen = streamed(stub.PredictStream(_request(tools=False)), tools=False)
    assert (seen.content, seen.reasoning) == ("", "On and on")
