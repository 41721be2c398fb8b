"""Anthropic's events and messages, built from given answers, without a model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from gateway.anthropic.answer import MessageAnswer
from gateway.anthropic.request import MessagesRequest
from gateway.calls import Done, Event, Piece, Progress, ToolCallPiece, Usage
from gateway.openai.messages import ThoughtPart
from tests.gateway.generated_answers import answers
from tests.gateway.requests_begun import begun

Json = dict[str, Any]


def answer(**fields: Any) -> MessageAnswer:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    return MessageAnswer(MessagesRequest.model_validate(body | fields), "m")


def rebuilt(events: list[Json]) -> Json:
    """The message, assembled as Anthropic's clients do."""
    message: Json = json.loads(json.dumps(events[0]["message"]))
    open_: list[int] = []
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            assert open_ == []
            open_ = [event["index"]]
            message["content"].append(json.loads(json.dumps(event["content_block"])) | {"json": ""})
        elif event["type"] == "content_block_delta":
            assert open_ == [event["index"]]
            block, delta = message["content"][-1], event["delta"]
            field, text = next(item for item in delta.items() if item[0] != "type")
            where = "json" if field == "partial_json" else field
            block[where] += text
        elif event["type"] == "content_block_stop":
            assert open_ == [event["index"]]
            open_ = []
            block = message["content"][-1]
            arguments = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments or "{}")
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert open_ == []
    assert [event["type"] for event in events].count("message_stop") == 1
    assert events[-1]["type"] == "message_stop"
    return message


@given(answers())
def test_a_stream_adds_up_to_the_whole_message(events: list[Event]) -> None:
    message = answer(stop_sequences=["END"])
    # An event must not change after it was returned, because it is written immediately.
    written: list[str] = []
    for event in events:
        written += [json.dumps(each) for each in message.take(event)]
    assert rebuilt([json.loads(each) for each in written]) == message.whole()
    end = events[-1]
    assert isinstance(end, Done)
    usage = message.whole()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == end.usage.prompt_tokens
    content = message.whole()["content"]
    for kind, field in (("thinking", "reasoning"), ("text", "content")):
        text = "".join(getattr(event, field) for event in events if isinstance(event, Piece))
        assert "".join(block[kind] for block in content if block["type"] == kind) == text
    texts = [block for block in content if block["type"] == "text"]
    assert all(block.keys() == {"type", "text", "citations"} for block in texts)


@pytest.mark.parametrize(
    "first",
    [
        Progress(7, 3, 3, 0.0),
        Piece(content="hi", usage=Usage(prompt_tokens=7)),
        Done("length", Usage(prompt_tokens=7)),
    ],
)
def test_the_first_event_counts_the_whole_prompt(first: Event) -> None:
    usage = answer().take(first)[0]["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (7, 0)
    assert usage["output_tokens"] == 0


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (Done("stop", Usage()), "end_turn", None),
        (Done("stop", Usage(), "END"), "stop_sequence", "END"),
        (Done("stop", Usage(), "the model file's own"), "end_turn", None),
        (Done("length", Usage(completion_tokens=5)), "max_tokens", None),
        (Done("length", Usage(completion_tokens=4)), "model_context_window_exceeded", None),
    ],
)
def test_stop_reasons(end: Done, reason: str, sequence: str | None) -> None:
    message = answer(stop_sequences=["END"])
    message.take(end)
    assert (message.whole()["stop_reason"], message.whole()["stop_sequence"]) == (
        reason,
        sequence,
    )


def test_a_call_ends_with_tool_use() -> None:
    message = answer()
    message.take(Piece(tool_calls=(ToolCallPiece(0, "a", "look", "{}"),)))
    message.take(Done("stop", Usage()))
    assert message.whole()["stop_reason"] == "tool_use"


@pytest.mark.parametrize("written", ["", '{"a'])
def test_an_incomplete_call_is_dropped_from_the_whole_answer(written: str) -> None:
    message = answer()
    events = message.take(Piece(tool_calls=(ToolCallPiece(0, "a", "look", written),)))
    message.take(Done("length", Usage(completion_tokens=5)))
    assert "content_block_start" in [event["type"] for event in events]
    assert (message.whole()["content"], message.whole()["stop_reason"]) == ([], "max_tokens")


def test_omitted_thinking_leaves_a_block_that_brings_it_back() -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    message = answer(thinking=thinking)
    events = message.take(Piece(reasoning="I "))
    events += message.take(Piece(reasoning="count.", content="open"))
    events += message.take(Done("stop", Usage()))
    assert not any(event.get("delta", {}).get("thinking") for event in events)
    hidden, text = message.whole()["content"]
    assert (hidden["thinking"], text["text"]) == ("", "open")
    assert ThoughtPart(**hidden).thought == "I count."


def test_a_message_has_every_field_of_the_api() -> None:
    message = answer()
    message.take(Piece(content="hi"))
    *_, delta, _ = message.take(Done("stop", Usage(5, 1, 2)))
    whole = message.whole()
    assert {"stop_details", "container"} <= whole.keys() & delta["delta"].keys()
    assert whole["usage"]["cache_creation"] == {
        "ephemeral_5m_input_tokens": 0,
        "ephemeral_1h_input_tokens": 0,
    }
    assert {"service_tier", "server_tool_use", "inference_geo"} <= whole["usage"].keys()


@pytest.mark.parametrize(
    ("piece", "kinds"), [(Piece("Hi"), ["text"]), (Piece(reasoning="Hm"), ["text", "thinking"])]
)
def test_a_long_silence_has_events_that_sdks_show(piece: Piece, kinds: list[str]) -> None:
    """SDKs hide pings, and Claude Code gives up after 300 s without another event."""
    request, message = begun(), answer()
    beats = [message.beat(), message.beat()]
    assert beats[1] == [{"type": "ping"}]
    request.started -= 60
    beats += [message.beat(), message.beat()]
    begun()  # later tests in this process do not share the start
    assert all(any(event["type"] != "ping" for event in events) for events in beats[2:])
    events = [event for beat in beats for event in beat]
    for event in (piece, Done("stop", Usage(9, 2))):
        events += message.take(event)
    found = rebuilt(events)
    assert [block["type"] for block in found["content"]] == kinds
    assert found["content"][0]["text"] == piece.content
