"""Feeds an answer to the parser in many splits, and compares the results."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from common.chat_events import (
    ChatEvent,
    ChatMessage,
    Content,
    Reasoning,
    ToolCallStart,
    merged,
    message_of,
)
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser

Plain = tuple[str, str, list[tuple[str, Any]]]


def plain(message: ChatMessage) -> Plain:
    """A message as plain values: random ids removed, arguments decoded."""
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return message.content, message.reasoning_content, calls


def splits(text: str, count: int = 4, seed: int = 0) -> Iterator[list[str]]:
    """The text whole, by characters, in pieces like tokens, and in random pieces."""
    yield [text]
    yield list(text)
    yield re.findall(r"\s?\w{1,5}|\s+|<\|?\w+|[^\w\s]", text)
    generator = random.Random(f"{seed} {text}")
    for _ in range(count):
        places = sorted(generator.choices(range(len(text) + 1), k=generator.randint(1, 12)))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def stream(
    format_: ChatFormat,
    pieces: Sequence[str],
    *,
    tools: Sequence[dict[str, Any]] = (),
    tail: str = "",
    reason: Literal["stop", "length"] = "stop",
    partial: bool = False,
) -> list[ChatEvent]:
    parser = ChatParser(format_, tools=tools, prompt_tail=tail, partial_calls=partial)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish(reason)]


def without_ids(events: Sequence[ChatEvent]) -> list[ChatEvent]:
    """Merged events with their random ids made equal."""
    return [
        ToolCallStart(event.index, re.sub("call_.*", "call_", event.id), event.name)
        if isinstance(event, ToolCallStart)
        else event
        for event in merged(events)
    ]


def assert_holds(partial: ChatMessage, whole: ChatMessage) -> None:
    """Assert that a stream with partial calls contains a whole answer."""
    assert partial.content == whole.content
    assert partial.reasoning_content == whole.reasoning_content
    shown = iter(partial.tool_calls)
    for call in whole.tool_calls:
        assert any((s.name, s.arguments) == (call.name, call.arguments) for s in shown)


def parse_every_split(
    format_: ChatFormat,
    text: str,
    *,
    tools: Sequence[dict[str, Any]] = (),
    tail: str = "",
    reason: Literal["stop", "length"] = "stop",
    count: int = 4,
) -> ChatMessage:
    """The message, which must be the same for every split.

    With partial calls, the stream must contain the whole message, and besides it only incomplete
    calls.
    """
    whole = stream(format_, [text], tools=tools, tail=tail, reason=reason)
    partial = stream(format_, [text], tools=tools, tail=tail, reason=reason, partial=True)
    assert_holds(message_of(partial), message_of(whole))
    for pieces in splits(text, count):
        events = stream(format_, pieces, tools=tools, tail=tail, reason=reason, partial=True)
        assert without_ids(events) == without_ids(partial), pieces
        events = stream(format_, pieces, tools=tools, tail=tail, reason=reason)
        assert without_ids(events) == without_ids(whole), pieces
        assert all(event.text for event in events if isinstance(event, Content | Reasoning))
    message = message_of(whole)
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    assert all(isinstance(json.loads(call.arguments), dict) for call in message.tool_calls)
    return message
