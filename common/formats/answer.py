"""Collects what a grammar finds, and leaves out the blank lines that templates put around blocks.

Templates separate reasoning, answer and calls by newlines that belong to none of them, while
whitespace inside an answer is the model's own. So newlines are held until it is known what
follows: text makes them part of it, the edge of a block drops them. Text that goes on after a
block keeps the newlines before it: no template puts them there, and without them two sentences
would become one. What stands between two blocks and is nothing but whitespace is dropped.
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
    """A call as it was read: `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = ""


class Answer:
    """The events of one answer; `take` hands out those that are new."""

    def __init__(self) -> None:
        self._events: list[ChatEvent] = []
        self._kind: type[Content] | type[Reasoning] = Content
        self._blank: list[str] = []
        self._after_block = False
        self._written: set[type[Content] | type[Reasoning]] = set()
        self._ids: set[str] = set()
        self.calls = 0
        self._begun = False
        self._told = 0  # characters of the arguments of the call that has begun
        self._latest = ""
        self.fresh = True
        """Nothing but whitespace has come since the beginning or the last block."""
        self.markdown = Markdown()

    @property
    def reasoning(self) -> bool:
        return self._kind is Reasoning

    @property
    def quotes(self) -> bool:
        """The latest character opens a quotation: it stands at the beginning of a word."""
        return bool(_OPENING_QUOTE.search(self._latest))

    @property
    def pending(self) -> str:
        """Space that is not shown before it is known what follows."""
        return "".join(self._blank)

    def take(self) -> list[ChatEvent]:
        events, self._events = self._events, []
        return events

    def write(self, text: str) -> None:
        """Add text to what is being written: an answer or reasoning."""
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
        """A block begins or ends here; what follows may be of another kind."""
        self._blank = []
        self._after_block = self.fresh = True
        self.markdown = Markdown()
        self._latest = ""
        if reasoning is not None:
            self._kind = Reasoning if reasoning else Content

    def exact(self, *, reasoning: bool) -> None:
        """An edge without separators: whitespace on both its sides is the model's own."""
        self.flush()
        self.edge(reasoning=reasoning)
        self._after_block = False

    def begin(self, name: str, identity: str) -> None:
        """A call of this name is being written; `tell` adds what is certain of its arguments."""
        if not identity or identity in self._ids:
            identity = f"call_{uuid.uuid4().hex}"
        self._ids.add(identity)
        self._events.append(ToolCallStart(self.calls, identity, name))
        self._begun = True

    def tell(self, text: str) -> None:
        """More of the arguments of the call that has begun, if one has."""
        if self._begun and text:
            self._events.append(ToolCallArguments(self.calls, text))
            self._told += len(text)

    def call(self, call: Call) -> None:
        """A call is complete: what was not told of it is told."""
        self.edge()
        if not self._begun:
            self.begin(call.name, call.id)
        self.tell(call.arguments[self._told :])
        self.abandon()

    def abandon(self) -> None:
        """No more comes of the call that has begun, if one has."""
        self.calls += self._begun
        self._begun, self._told = False, 0

    def flush(self) -> None:
        """The text is over: whitespace at its end is the model's own, unless it is all there is."""
        if not (self.fresh and self._after_block) and (text := "".join(self._blank)):
            self._events.append(self._kind(text))
        self._blank = []
