"""Defines the events that parsing an answer yields, and the complete message.

The number of events among which a text is divided has no meaning. `merged` joins adjacent events of
the same kind, so two streams are equivalent if their merged events are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of reasoning before or between parts of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a call, with its complete name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments; all pieces with the same index form a JSON object.

    If the call is malformed or cut off, the pieces form only the beginning of an object.
    """

    index: int
    text: str


ChatEvent = Content | Reasoning | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call.

    arguments: a JSON object as text; only the beginning of an object if the call is malformed.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A complete answer; missing parts are empty strings or an empty list."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def is_whole(arguments: str) -> bool:
    """Return whether the arguments of a call are complete; truncated ones are not valid JSON."""
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True


def merged(events: Iterable[ChatEvent]) -> list[ChatEvent]:
    """Return the events with adjacent texts of the same kind and call joined."""
    found: list[ChatEvent] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", 0))):
        first, *more = group
        if more and not isinstance(first, ToolCallStart):
            texts = (each.text for each in more if not isinstance(each, ToolCallStart))
            first = replace(first, text="".join([first.text, *texts]))
        found.append(first)
    return found


def message_of(events: Iterable[ChatEvent]) -> ChatMessage:
    """Return the message that a complete stream of events forms."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: dict[int, ToolCallStart] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart(index):
                starts[index] = event
            case ToolCallArguments(index, text):
                arguments.setdefault(index, []).append(text)
    calls = [
        ToolCall(index, start.id, start.name, "".join(arguments.get(index, ())))
        for index, start in sorted(starts.items())
    ]
    return ChatMessage("".join(content), "".join(reasoning), calls)
