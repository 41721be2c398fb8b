"""Parses a model's output incrementally into content, reasoning and tool calls.

The result does not depend on how the text was split into pieces, because grammars read single
characters. A complete text is parsed by the same code as a stream.

A call is returned when it is complete, and not at all if the length limit has cut it off. With
`partial_calls`, it is returned while it is generated. A malformed call is returned as content,
exactly as the model wrote it, or as an incomplete call if its beginning was certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.chat_events import (
    ChatEvent,
    ChatMessage,
    Content,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    message_of,
)
from common.chat_format import ChatFormat
from common.formats.answer import Answer
from common.formats.cursor import END_TOKENS
from common.formats.end_tokens import EndTokens, TightMarks
from common.formats.reading import FinishReason, Reading, Tags
from common.formats.tool_schema import ToolSchemas
from common.prefixes import common_prefix

__all__ = [
    "ChatEvent",
    "ChatMessage",
    "ChatParser",
    "Content",
    "Reasoning",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "parse_chat",
]


class ChatParser:
    """Parses one answer.

    tools: the tools that the model may call, or their schemas, which several parsers may share;
        without tools, calls are content.
    prompt_tail: the end of the prompt, which shows whether reasoning has begun.
    begun: the beginning of the answer, if the prompt ends with it; this text is parsed, but its
        events are not returned.
    partial_calls: whether to return the start of a call when its name is certain, and its arguments
        in pieces: strings while they are generated, other values when they are complete.
    """

    def __init__(
        self,
        format: ChatFormat,  # noqa: A002 - the name is part of the public seam
        *,
        tools: Sequence[Mapping[str, Any]] | ToolSchemas = (),
        prompt_tail: str = "",
        begun: str = "",
        partial_calls: bool = False,
    ) -> None:
        self._answer = Answer()
        self._ends = EndTokens(format.markers)
        grammar = format.grammar
        self._tight = TightMarks(dict(grammar.tight))
        # A template may change the beginning of the text but not its end.
        kept = common_prefix(prompt_tail[::-1], begun[::-1])
        before, begun = prompt_tail[: len(prompt_tail) - kept], begun[len(begun) - kept :]
        schemas = tools if isinstance(tools, ToolSchemas) else ToolSchemas(tools or ())
        self._reading = Reading(self._answer, schemas, before)
        self._closers = grammar.closers
        self._grammar = grammar.read(self._reading)
        self._finished = False
        self._begun_text = ""  # text of `begun` that is still to be removed from events
        if begun:
            self.feed(begun)
            self._begun_text = self._answer.pending + self._pending
        self._answer.partial = partial_calls

    @property
    def reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, according to the text parsed so far."""
        return self._answer.reasoning

    @property
    def reasoning_end(self) -> str:
        """The text that would close the reasoning here; '' if there is nothing to close.

        There is nothing to close outside reasoning and in the middle of a call, nor after a closing
        tag that may still turn out to be a quotation. The text also closes an open code block,
        because inside it the closing tag would be a quotation.
        """
        reading, written = self._reading, self._pending
        closing = reading.closing
        if not self.reasoning or reading.begun or reading.pending_calls or closing in written:
            return ""
        for length in range(min(len(closing), len(written)), 0, -1):
            if written.endswith(closing[:length]):
                return closing[length:]
        if self._answer.markdown.fenced:
            return f"\n{self._answer.markdown.fence}\n{closing}"
        return f"\n{closing}" if self._answer.quotes else closing

    def may_open(self, tags: Tags) -> bool:
        """Return whether these tags would open reasoning here."""
        if self.reasoning:
            return self._reading.closing in self._pending
        return tags.anywhere or self._answer.fresh

    def ends_with(self, stop_string: str) -> bool:
        """Return whether the model itself ends calls or answers with this text."""
        return stop_string in END_TOKENS or stop_string in self._closers

    def feed(self, text: str) -> list[ChatEvent]:
        """Parse the next piece of text. Returns the events that following text cannot change."""
        if self._finished:
            raise ValueError("the answer is finished: create another parser")
        self._reading.feed(self._tight.feed(self._ends.feed(text)))
        next(self._grammar)
        return self._new()

    def finish(self, reason: FinishReason) -> list[ChatEvent]:
        """Parse the end of the answer, and return the remaining events.

        reason: "stop" if the model has stopped, "length" if the answer was cut off.
        """
        if self._finished:
            return []
        self._finished = True
        self._reading.feed(self._tight.feed(self._ends.finish()) + self._tight.finish())
        self._reading.ended = True
        self._reading.stopped = reason == "stop"
        self._reading.reason = reason
        for _ in self._grammar:
            raise AssertionError("a grammar asks for more text after the end")
        self._answer.flush()
        return self._new()

    @property
    def _pending(self) -> str:
        """The text that was received but not parsed yet."""
        return self._reading.pending + self._tight.held + self._ends.held

    def _new(self) -> list[ChatEvent]:
        events = self._answer.take()
        if not self._begun_text:
            return events
        return [new for event in events if (new := self._without_begun(event)) is not None]

    def _without_begun(self, event: ChatEvent) -> ChatEvent | None:
        """Return the event without the text of `begun`; None if no text is left."""
        known, self._begun_text = self._begun_text, ""
        if not known or not isinstance(event, Content | Reasoning):
            return event
        if event.text.startswith(known):
            rest = event.text[len(known) :]
            return replace(event, text=rest) if rest else None
        if not known.startswith(event.text):
            return event
        self._begun_text = known[len(event.text) :]
        return None


def parse_chat(
    text: str,
    format: ChatFormat,  # noqa: A002 - the name is part of the public seam
    *,
    tools: Sequence[Mapping[str, Any]] | ToolSchemas = (),
    prompt_tail: str = "",
    reason: FinishReason = "stop",
) -> ChatMessage:
    """Parse a complete answer."""
    parser = ChatParser(format, tools=tools, prompt_tail=prompt_tail)
    return message_of([*parser.feed(text), *parser.finish(reason)])
