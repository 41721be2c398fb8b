"""Feeds an answer to the parser in many splits, and compares the results."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Literal

from common.chat_events import (
    ChatEvent,
    ChatMessage,
    Content,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    merged,
    message_of,
)
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser
from common.formats.answer import Answer
from common.formats.tool_schema import ToolSchemas

Plain = tuple[str, str, list[tuple[str, Any]]]


def is_whole(call: ToolCall) -> bool:
    """Whether a call's arguments are a complete object."""
    try:
        return isinstance(json.loads(call.arguments), dict)
    except ValueError:
        return False


def plain(message: ChatMessage) -> Plain:
    """A message as plain values: random ids removed, arguments decoded.

    The arguments of an incomplete call are their text.
    """
    calls = [
        (call.name, json.loads(call.arguments) if is_whole(call) else call.arguments)
        for call in message.tool_calls
    ]
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
    tools: Sequence[dict[str, Any]] | ToolSchemas = (),
    tail: str = "",
    reason: Literal["stop", "length"] = "stop",
    partial: bool = False,
) -> list[ChatEvent]:
    parser = ChatParser(format_, tools=tools, prompt_tail=tail, partial_calls=partial)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish(reason)]


class _BothAnswers:
    """Gives all to an answer with partial calls and to one without, so that a text is parsed once.

    What the parser asks of them must be equal.
    """

    def __init__(self) -> None:
        self.__dict__["_answers"] = (Answer(), Answer())
        self.__dict__["_answers"][0].partial = True

    def __getattr__(self, name: str) -> Any:
        first, second = (getattr(answer, name) for answer in self._answers)
        if callable(first):
            return lambda *given, **named: (first(*given, **named), second(*given, **named))
        assert name == "markdown" or first == second
        return first

    def __setattr__(self, name: str, value: Any) -> None:
        for answer in self._answers:
            setattr(answer, name, copy(value))


def both_streams(
    format_: ChatFormat,
    pieces: Sequence[str],
    *,
    tools: ToolSchemas,
    tail: str = "",
    reason: Literal["stop", "length"] = "stop",
) -> tuple[list[ChatEvent], list[ChatEvent]]:
    """The events of `stream` with partial calls, and without."""
    parser: Any = ChatParser(format_, tools=tools, prompt_tail=tail)
    parser._answer = parser._reading.answer = _BothAnswers()
    partial: list[ChatEvent] = []
    whole: list[ChatEvent] = []
    for new in (*map(parser.feed, pieces), parser.finish(reason)):
        partial += new[0]
        whole += new[1]
    return partial, whole


def without_ids(events: Sequence[ChatEvent]) -> list[ChatEvent]:
    """Merged events with their random ids made equal."""
    return [
        ToolCallStart(event.index, re.sub("call_.*", "call_", event.id), event.name)
        if isinstance(event, ToolCallStart)
        else event
        for event in merged(events)
    ]


def without_cut_call(events: Sequence[ChatEvent]) -> list[ChatEvent]:
    """The events without those of an incomplete call at the end."""
    calls = message_of(events).tool_calls
    last = merged(events)[-1] if events else None
    if not calls or is_whole(calls[-1]) or not isinstance(last, ToolCallArguments):
        return list(events)
    return [
        event
        for event in events
        if isinstance(event, Content | Reasoning) or event.index != calls[-1].index
    ]


def parse_every_split(
    format_: ChatFormat,
    text: str,
    *,
    tools: Sequence[dict[str, Any]] = (),
    tail: str = "",
    reason: Literal["stop", "length"] = "stop",
    count: int = 4,
) -> ChatMessage:
    """The message, which must be the same for every split, and with partial calls as well.

    If the length limit cuts the text, partial calls add the beginning of a last call.
    """
    schemas = ToolSchemas(tools)
    given: dict[str, Any] = {"tools": schemas, "tail": tail, "reason": reason}
    partial = stream(format_, [text], partial=True, **given)
    whole = stream(format_, [text], **given)
    shown = without_cut_call(partial) if reason == "length" else partial
    expected = [without_ids(partial), without_ids(whole)]
    assert without_ids(shown) == expected[1]
    assert without_ids(stream(format_, list(text), partial=True, **given)) == expected[0]
    assert without_ids(stream(format_, list(text), **given)) == expected[1]
    for pieces in dict.fromkeys(map(tuple, splits(text, count))):
        found = both_streams(format_, pieces, **given)
        assert [without_ids(events) for events in found] == expected, pieces
        for event in (*found[0], *found[1]):
            assert not isinstance(event, Content | Reasoning) or event.text
    message = message_of(whole)
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    for call in message.tool_calls:
        assert is_whole(call) or message.content, call
    return message
