"""Collects the events that a grammar finds, without the blank lines that separate blocks.

Templates put newlines between reasoning, answer and calls that belong to none of them, while
whitespace inside an answer is output. So newlines are held back until the next text is known:
before text they are output, at the edge of a block they are dropped. If text continues after a
block, the newlines before that text are kept: no template writes them, and without them two
sentences would run together. Whitespace alone between two blocks is dropped.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from common.chat_events import ChatEvent, Content, Reasoning, ToolCallArguments, ToolCallStart
from common.formats.markdown import Markdown

_OPENING_QUOTE = re.compile(r"(?:^|[\s(\[{])[`'\"“‘«]\Z")


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed call: `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = ""


class Answer:
    """The events of one answer; `take` returns the new ones."""

    def __init__(self) -> None:
        self._events: list[ChatEvent] = []
        self._kind: type[Content] | type[Reasoning] = Content
        self._blank: list[str] = []
        self._after_block = False
        self._written: set[type[Content] | type[Reasoning]] = set()
        self._ids: set[str] = set()
        self.calls = 0
        """Calls that have begun."""
        self.called = False
        """Whether a call was completed."""
        self._begun = False
        self._sent = 0  # characters already sent of the open call's arguments
        self._latest = ""
        self.fresh = True
        """Whether only whitespace has come since the beginning or the last block."""
        self.markdown = Markdown()

    @property
    def reasoning(self) -> bool:
        return self._kind is Reasoning

    @property
    def quotes(self) -> bool:
        """Whether the latest character is a quotation mark at the beginning of a word."""
        return bool(_OPENING_QUOTE.search(self._latest))

    @property
    def pending(self) -> str:
        """Whitespace that is held back until the next text is known."""
        return "".join(self._blank)

    def take(self) -> list[ChatEvent]:
        events, self._events = self._events, []
        return events

    def write(self, text: str) -> None:
        """Add text to the current kind of output: answer or reasoning."""
        if not text:
            return
        self.markdown.feed(text)
        self._latest = (self._latest + text[-2:])[-2:]
        body = text.strip() if self.fresh else text.rstrip("\n")
        if not body:
            self._blank.append(text)
            return
        end = len(text.rstrip("\n"))
        lead = "".join(self._blank)
        if self.fresh and self._after_block and self._kind not in self._written:
            shown = (lead + text[:end]).lstrip("\n")
        else:
            shown = lead + text[:end]
        self._blank = [text[end:]]
        self.fresh = False
        self._written.add(self._kind)
        self._events.append(self._kind(shown))

    def edge(self, *, reasoning: bool | None = None) -> None:
        """Mark the edge of a block; the following text may be of another kind."""
        self._blank = []
        self._after_block = self.fresh = True
        self.markdown = Markdown()
        self._latest = ""
        if reasoning is not None:
            self._kind = Reasoning if reasoning else Content

    def exact(self, *, reasoning: bool) -> None:
        """Mark an edge without separators: whitespace on both sides of it is output."""
        self.flush()
        self.edge(reasoning=reasoning)
        self._after_block = False

    def begin(self, name: str, identity: str) -> None:
        """Begin a call of this name; `send` adds the certain part of its arguments."""
        if not identity or identity in self._ids:
            identity = f"call_{uuid.uuid4().hex}"
        self._ids.add(identity)
        self._events.append(ToolCallStart(self.calls, identity, name))
        self._begun = True

    def send(self, text: str) -> None:
        """Add to the arguments of the open call, if there is one."""
        if self._begun and text:
            self._events.append(ToolCallArguments(self.calls, text))
            self._sent += len(text)

    def call(self, call: Call) -> None:
        """Complete a call; sends the part that has not been sent."""
        self.edge()
        if not self._begun:
            self.begin(call.name, call.id)
        self.send(call.arguments[self._sent :])
        self.called = True
        self.abandon()

    def abandon(self) -> None:
        """End the open call, if there is one, without completing it."""
        self.calls += self._begun
        self._begun, self._sent = False, 0

    def flush(self) -> None:
        """End the text: trailing whitespace is output unless there is nothing else."""
        if not (self.fresh and self._after_block) and (text := "".join(self._blank)):
            self._events.append(self._kind(text))
        self._blank = []
