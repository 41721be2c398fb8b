"""Response objects and their events, built from given answers, without a model."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from gateway.calls import Done, Event, Piece, ToolCallPiece, Usage
from gateway.errors import ApiError
from gateway.models.config import Parameters
from gateway.responses.answer import ResponseAnswer
from gateway.responses.items import offered
from gateway.responses.request import ResponsesRequest
from tests.gateway.generated_answers import answers

Json = dict[str, Any]


def answer(**fields: Any) -> ResponseAnswer:
    body = {"model": "m", "input": "hi"} | fields
    request = ResponsesRequest.model_validate(body)
    defaults = Parameters(model="x", temperature=0.25)
    return ResponseAnswer(request, "m", defaults, [*offered(request.tools)], lambda _: None)


class Client:
    """Assembles a response from events, as OpenAI's clients do."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self.deltas: list[str] = []
        self.finished: set[int] = set()

    def read(self, event: Json) -> None:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(self.items)
            assert len(self.finished) == len(self.items)
            assert event["item"]["status"] == "in_progress"
            self.items.append(event["item"])
            self.deltas = []
        elif kind.startswith("response.") and kind.endswith(".delta"):
            assert event["item_id"] == self.items[-1]["id"]
            self.deltas.append(event["delta"])
        elif kind == "response.content_part.added":
            self.items[-1]["content"].append(event["part"])
        elif kind == "response.reasoning_summary_part.added":
            assert event["summary_index"] == len(self.items[-1]["summary"])
            self.items[-1]["summary"].append(event["part"])
        elif kind == "response.reasoning_summary_part.done":
            self.items[-1]["summary"][event["summary_index"]] = event["part"]
            assert event["part"]["text"] == "".join(self.deltas)
        elif kind in (
            "response.output_text.done",
            "response.reasoning_text.done",
            "response.reasoning_summary_text.done",
        ):
            assert event["text"] == "".join(self.deltas)
        elif kind == "response.content_part.done":
            self.items[-1]["content"][event["content_index"]] = event["part"]
            assert event["part"]["text"] == "".join(self.deltas)
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == "".join(self.deltas)
            self.items[-1]["arguments"] = event["arguments"]
        elif kind == "response.custom_tool_call_input.done":
            assert event["input"] == "".join(self.deltas)
            self.items[-1]["input"] = event["input"]
        elif kind == "response.output_item.done":
            index = event["output_index"]
            assert event["item"] == self.items[index] | {"status": event["item"]["status"]}
            self.items[index] = event["item"]
            self.finished.add(index)


@given(answers(), st.sampled_from([None, "none", "auto"]))
def test_a_stream_adds_up_to_the_whole_response(events: list[Event], summary: str | None) -> None:
    response = answer(reasoning={"summary": summary})
    # An event must not change after it was returned, because it is written immediately.
    written: list[str] = []
    for event in events:
        written += [json.dumps(each) for each in response.take(event)]
    read = [json.loads(each) for each in written]
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    assert [event["type"] for event in read[:2]] == ["response.created", "response.in_progress"]
    client = Client()
    for event in read:
        client.read(event)
    last = read[-1]["response"]
    assert last == response.whole()
    assert client.items == last["output"]
    assert len(client.finished) == len(client.items)
    end = events[-1]
    assert isinstance(end, Done)
    cut = end.finish_reason == "length"
    assert last["status"] == ("incomplete" if cut else "completed")
    assert read[-1]["type"] == f"response.{last['status']}"
    assert (last["incomplete_details"] is not None) == cut
    assert last["usage"]["total_tokens"] == end.usage.prompt_tokens + end.usage.completion_tokens
    pieces = [event for event in events if isinstance(event, Piece)]
    texts = [item["content"][0] for item in last["output"] if item["type"] == "message"]
    assert "".join(part["text"] for part in texts) == "".join(piece.content for piece in pieces)
    count = sum(len(piece.logprobs) for piece in pieces)
    assert sum(len(part["logprobs"]) for part in texts) == count


@pytest.mark.parametrize("summary", ["auto", "detailed", "none", None])
def test_reasoning_is_its_own_summary_if_one_is_asked_for(summary: str | None) -> None:
    response = answer(reasoning={"summary": summary})
    events = [*response.take(Piece(reasoning="So")), *response.take(Piece(reasoning="."))]
    events += response.take(Done("stop", Usage(3, 4)))
    summed = summary not in ("none", None)
    prefix = "response.reasoning_summary" if summed else "response.reasoning"
    index = "summary_index" if summed else "content_index"
    deltas = [event for event in events if event["type"] == f"{prefix}_text.delta"]
    assert [(event["delta"], event[index]) for event in deltas] == [("So", 0), (".", 0)]
    (done,) = [event for event in events if event["type"] == f"{prefix}_text.done"]
    assert (done["text"], done[index]) == ("So.", 0)
    (item,) = response.whole()["output"]
    part = {"type": "summary_text" if summed else "reasoning_text", "text": "So."}
    assert (item["summary"], item["content"]) == (([part], []) if summed else ([], [part]))
    assert response.whole()["reasoning"]["summary"] == summary


def test_an_incomplete_call_is_partial_in_a_stream_and_dropped_from_the_whole() -> None:
    response = answer()
    response.take(Piece(tool_calls=(ToolCallPiece(0, "a", "look", "{}"),)))
    response.take(Piece(tool_calls=(ToolCallPiece(1, "b", "look", '{"a'),)))
    last = response.take(Done("length", Usage(3, 4)))[-1]["response"]
    assert [item["status"] for item in last["output"]] == ["completed", "incomplete"]
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response.whole() == last | {"output": last["output"][:1]}


def test_a_completely_sent_call_is_completed_however_the_answer_ends() -> None:
    response = answer()
    response.take(Piece(tool_calls=(ToolCallPiece(0, "a", "look", '{"a": 1}'),)))
    events = response.take(Done("length", Usage(3, 4)))
    (done,) = [event for event in events if event["type"] == "response.output_item.done"]
    assert done["item"]["status"] == response.whole()["output"][0]["status"] == "completed"
    assert response.whole()["status"] == "incomplete"


def entries(*tokens: str) -> tuple[Json, ...]:
    return tuple(
        {"id": 1, "token": token, "bytes": list(token.encode()), "logprob": -0.5}
        for token in tokens
    )


@pytest.mark.parametrize(
    ("thought", "content", "text", "tokens"),
    [
        (["hm"], ["</think>", "\n\n", "The"], "The", ["The"]),
        (["hm", "</think>", "The"], [], "The", ["The"]),
        (["hm", "</think>"], ["The"], "The", ["The"]),
        (["hm"], ["</", "think>", "<"], "<", ["<"]),
        # The end of the text is withheld.
        (["hm"], ["</think>", "The", " EN"], "The", ["The", " EN"]),
        # One token with both markup and text, which cannot be separated.
        (["hm"], ["</think>The"], "The", ["</think>The"]),
    ],
)
def test_text_begins_with_its_own_log_probabilities(
    thought: list[str], content: list[str], text: str, tokens: list[str]
) -> None:
    response = answer()
    response.take(Piece(reasoning="hm", logprobs=entries(*thought)))
    response.take(Piece(content=text, logprobs=entries(*content)))
    response.take(Piece(content="!", logprobs=entries("!")))
    response.take(Done("stop", Usage()))
    part = response.whole()["output"][1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == [*tokens, "!"]


def test_a_failure_during_the_answer_is_a_failed_response() -> None:
    result = answer()
    result.take(Piece(content="half a"))
    (last,) = result.fail(ApiError(503, "the backend of this model has gone away"))
    assert last["type"] == "response.failed"
    response = last["response"]
    assert (response["status"], response["usage"]) == ("failed", None)
    assert response["error"]["code"] == "server_error"
    assert "gone away" in response["error"]["message"]
    assert response["output"][0]["content"][0]["text"] == "half a"
    assert response["output"][0]["status"] == "incomplete"


def test_reasoning_is_also_encrypted_content_if_that_is_included() -> None:
    for fields, sealed in (
        ({"include": ["reasoning.encrypted_content"]}, "reasoning:I count."),
        ({}, None),
    ):
        reply = answer(**fields)
        events = [*reply.take(Piece(reasoning="I ")), *reply.take(Piece(reasoning="count."))]
        events += reply.take(Done("stop", Usage()))
        (done,) = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert reply.whole()["output"] == [done]
        assert done.get("encrypted_content") == sealed


def test_a_failure_before_the_first_token_is_a_response_too() -> None:
    kinds = [event["type"] for event in answer().fail(ApiError(429, "full"))]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]


def test_a_response_repeats_the_requests_fields() -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    response = answer(
        tools=[tool],
        tool_choice={"type": "function", "name": "look"},
        text={"format": schema},
        metadata={"a": "b"},
        top_p=0.5,
        instructions="Be brief.",
        store=False,
    ).whole()
    assert response["tools"] == [tool | {"description": None, "strict": False}]
    assert response["tool_choice"] == {"type": "function", "name": "look"}
    assert response["text"]["format"] == schema
    assert (response["metadata"], response["top_p"], response["instructions"]) == (
        {"a": "b"},
        0.5,
        "Be brief.",
    )
    assert response["store"] is False
    assert response["temperature"] == 0.25


def test_a_call_of_a_tool_in_a_namespace_has_both_names() -> None:
    inner = [{"type": "function", "name": "read"}, {"type": "custom", "name": "patch"}]
    tools = [{"type": "namespace", "name": "mcp__files", "tools": inner}]
    reply = answer(tools=tools)
    reply.take(Piece(tool_calls=(ToolCallPiece(0, "c1", "mcp__files__read", "{}"),)))
    patch = ToolCallPiece(1, "c2", "mcp__files__patch", '{"input": "x"}')
    reply.take(Piece(tool_calls=(patch,)))
    reply.take(Done("stop", Usage()))
    response = [(item["type"], item["namespace"], item["name"]) for item in reply.whole()["output"]]
    assert response == [
        ("function_call", "mcp__files", "read"),
        ("custom_tool_call", "mcp__files", "patch"),
    ]
    assert reply.whole()["tools"][0]["name"] == "mcp__files"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (['{"input": "*** Beg', 'in\\n"}'], "*** Begin\n"),
        (['{"input": ""}'], ""),
        (['{"in": 1}'], '{"in": 1}'),
        (["plain"], "plain"),
        (["{}"], "{}"),
    ],
)
def test_a_call_of_a_custom_tool_has_its_text(arguments: list[str], text: str) -> None:
    reply = answer(tools=[{"type": "custom", "name": "patch"}])
    client = Client()
    events: list[Json] = []
    for at, part in enumerate(arguments):
        first = ToolCallPiece(0, "c1", "patch", part) if at == 0 else ToolCallPiece(0, "", "", part)
        events += reply.take(Piece(tool_calls=(first,)))
    events += reply.take(Done("stop", Usage()))
    for event in events:
        client.read(event)
    item = client.items[0]
    assert (item["type"], item["call_id"], item["name"]) == ("custom_tool_call", "c1", "patch")
    assert item["input"] == text
    assert reply.whole()["output"] == client.items
    assert reply.whole()["tools"] == [{"type": "custom", "name": "patch"}]


@given(st.text(max_size=20), st.lists(st.integers(0, 80), max_size=4), st.booleans())
def test_the_text_of_a_custom_tool_is_streamed_as_it_is_generated(
    text: str, cuts: list[int], escaped: bool
) -> None:
    """Every delta is sent immediately; an incomplete text is sent as far as it was generated."""
    written = json.dumps({"input": text}, ensure_ascii=escaped)
    places = sorted({0, *(min(cut, len(written)) for cut in cuts)})
    response = answer(tools=[{"type": "custom", "name": "patch"}])
    client = Client()
    for start, end in pairwise(places):
        piece = ToolCallPiece(0, "c1", "patch", written[start:end])
        for event in response.take(Piece(tool_calls=(piece,))):
            client.read(event)
        whole = from_json(written[:end], allow_partial="trailing-strings")
        assert "".join(client.deltas) == whole.get("input", "")
    for event in response.take(Done("length", Usage())):
        client.read(event)
    if client.items:
        complete = places[-1] == len(written)
        assert client.items[0]["status"] == ("completed" if complete else "incomplete")
        assert text.startswith(client.items[0]["input"])
        assert (client.items[0]["input"] == text) >= complete
