"""Agents' answers over the wire: reasoning, calls and results, one at a time and eight at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.acceptance.backend import WAIT, Backend, chat
from tests.rpc.localai_host import Seen, streamed, unary
from wire import backend_pb2 as pb

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TOOLS = json.dumps([WEATHER])
THINKING = {"enable_thinking": "true"}


def _after_a_result() -> pb.PredictOptions:
    call = {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    request = chat("What is the weather in Paris?", Tools=TOOLS)
    request.Messages.add(role="assistant", tool_calls=json.dumps([call]))
    request.Messages.add(
        role="tool", tool_call_id="call_1", content='{"city": "Paris", "temperature": 21}'
    )
    return request


REQUESTS = {
    "plain": chat("What is the capital of France?"),
    "reasoning": chat("What is 3 + 4?", Metadata=THINKING),
    "one call": chat("What is the weather in Paris?", Tools=TOOLS),
    "two calls": chat("What is the weather in Paris and London?", Tools=TOOLS),
    "text and call": chat("Please check the weather in Paris.", Tools=TOOLS),
    "after a result": _after_a_result(),
    "chinese": chat("Say hello in Chinese."),
    "declined": chat("What is the weather in Paris?", Tools=TOOLS, ToolChoice='"none"'),
}


def _ask(backend: Backend, name: str) -> Seen:
    """Ask with a unary call and with a stream; a host's client must get the same from both."""
    request = REQUESTS[name]
    tools = bool(request.Tools) and name != "declined"
    stream = streamed(backend.stub.PredictStream(request, timeout=WAIT), tools=tools)
    whole = unary(backend.stub.Predict(request, timeout=WAIT), tools=tools)
    for seen in (stream, whole):
        assert not seen.invented
        assert not seen.retried
    assert stream.content == whole.content
    assert stream.reasoning == whole.reasoning
    assert stream.calls == whole.calls
    return whole


@pytest.fixture(scope="module")
def answers(served: Backend) -> dict[str, Seen]:
    return {name: _ask(served, name) for name in REQUESTS}


def _cities(seen: Seen) -> list[Any]:
    assert {name for name, _ in seen.calls} <= {"get_weather"}
    return [json.loads(arguments)["city"] for _, arguments in seen.calls]


def test_reasoning_is_separate_from_the_answer(answers: dict[str, Seen]) -> None:
    seen = answers["reasoning"]
    assert "3 + 4" in seen.content
    assert seen.reasoning
    assert "<think>" not in seen.content + seen.reasoning
    assert seen.content == seen.content.strip()


def test_calls_are_structured(answers: dict[str, Seen]) -> None:
    assert _cities(answers["one call"]) == ["Paris"]
    assert _cities(answers["two calls"]) == ["Paris", "London"]
    assert _cities(answers["text and call"]) == ["Paris"]
    assert answers["text and call"].content == "Let me check."
    assert answers["one call"].content == answers["two calls"].content == ""


def test_plain_answers_have_no_calls(answers: dict[str, Seen]) -> None:
    for name in ("plain", "reasoning", "after a result", "chinese", "declined"):
        assert answers[name].calls == []
        assert answers[name].content
    assert "21" in answers["after a result"].content
    assert any("\u4e00" <= character <= "\u9fff" for character in answers["chinese"].content)


def test_a_prefilled_answer_is_continued(served: Backend) -> None:
    metadata = {"enable_thinking": "false", "mlx.continue_final_message": "true"}
    begun = chat("Count to 9.", "1 2 3", Metadata=metadata)
    stream = streamed(served.stub.PredictStream(begun, timeout=WAIT), tools=False)
    whole = unary(served.stub.Predict(begun, timeout=WAIT), tools=False)
    assert stream.content == whole.content == " 4 5 6 7 8 9"
    again = chat("Count to 9.", "1 2 3 4 5", "Count to 9.", "1 2", Metadata=metadata)
    assert unary(served.stub.Predict(again, timeout=WAIT), tools=False).content[:4] == " 3 4"
    thought = chat("What is 3 + 4?", "<think>\n", Metadata={**metadata, **THINKING})
    seen = unary(served.stub.Predict(thought, timeout=WAIT), tools=False)
    assert seen.reasoning
    assert "</think>" not in seen.content + seen.reasoning


def test_eight_concurrent_answers_equal_those_of_lone_requests(
    served: Backend, answers: dict[str, Seen]
) -> None:
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        together = dict(zip(REQUESTS, pool.map(lambda n: _ask(served, n), REQUESTS), strict=True))
    for name, seen in together.items():
        assert (seen.content, seen.reasoning, seen.calls) == (
            answers[name].content,
            answers[name].reasoning,
            answers[name].calls,
        )


def test_a_call_cut_by_the_limit_is_dropped_from_the_answer_but_partial_in_a_stream(
    served: Backend,
) -> None:
    whole = served.stub.Predict(REQUESTS["one call"], timeout=WAIT)
    (written,) = whole.chat_deltas
    (final,) = written.tool_calls
    shown = set()
    request = pb.PredictOptions()
    request.CopyFrom(REQUESTS["one call"])
    for limit in range(1, whole.tokens):
        request.Tokens = limit
        reply = served.stub.Predict(request, timeout=WAIT)
        assert reply.tokens == limit
        (delta,) = reply.chat_deltas
        assert written.content.startswith(delta.content)
        for call in delta.tool_calls:
            assert json.loads(call.arguments) == {"city": "Paris"}
        replies = list(served.stub.PredictStream(request, timeout=WAIT))
        deltas = [delta for reply in replies for delta in reply.chat_deltas]
        assert written.content.startswith("".join(delta.content for delta in deltas))
        arguments = "".join(call.arguments for delta in deltas for call in delta.tool_calls)
        assert final.arguments.startswith(arguments)
        shown.add(arguments)
    assert len(shown) > 2


def test_metadata_names_the_format(served: Backend) -> None:
    metadata = served.stub.ModelMetadata(pb.ModelOptions(), timeout=WAIT)
    assert metadata.tool_format.format_type == "hermes"
    assert metadata.tool_format.section_start == "<tool_call>"
    assert metadata.tool_format.reasoning_end == "</think>"
