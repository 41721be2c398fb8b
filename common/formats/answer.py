"""Collects the events that a grammar finds, without the blank lines that separate blocks.

Templates put newlines between reasoning, answer and calls that belong to none of them, while
whitespace inside an answer is output. So newlines are held back until the next text is known:
before text they are output, at the edge of a block they are dropped. Where no block can follow, as
in a code block of the answer, they are output at once. If text continues after a block, the
newlines before that text are kept: no template writes them, and without them the texts would
run together. Whitespace alone between two blocks is dropped.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from common.chat_events import ChatEvent, Content, Reasoning, ToolCallArguments, ToolCallStart
from common.formats.markdown import Markdown

_FIRST_BREAKS = re.compile(r"\A(?:\r?\n)+")
_OPENING_QUOTE = re.compile(r"(?:^|[\s(\[{])[`'\"“‘«]\Z")


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed call: `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = ""


class Answer:
    """The events of one answer; `take` returns the new ones.

    partial: `take` returns the events of a call that is not complete yet. Otherwise they are held
    back until the call is complete or has failed, and dropped if the length limit cut it off.
    """

    def __init__(self) -> None:
        self.partial = False
        self._events: list[ChatEvent] = []
        self._open: list[ChatEvent] = []  # events of the incomplete call
        self._kind: type[Content] | type[Reasoning] = Content
        self._blank: list[str] = []
        self._after_block = False
        self.last_block = False
        """Whether nothing but text can follow content."""
        self._written: set[type[Content] | type[Reasoning]] = set()
        self._ids: set[str] = set()
        self.calls = 0
        """Calls that have begun."""
        self.called = False
        """Whether a call was completed."""
        self._begun: Call | None = None
        self._sent = 0  # characters already sent of the open call's arguments
        self._unsent = ""  # arguments of the open call that are held back
        self._latest = ""
        self.fresh = True
        """Whether only whitespace has come since the beginning or the last block."""
        self.markdown = Markdown()

    @property
    def reasoning(self) -> bool:
        return self._kind is Reasoning

    @property
    def after_block(self) -> bool:
        """Whether only whitespace has come since the last block."""
        return self.fresh and self._after_block

    @property
    def quotes(self) -> bool:
        """Whether the latest character is a quotation mark at the beginning of a word."""
        return bool(_OPENING_QUOTE.search(self._latest))

    @property
    def pending(self) -> str:
        """Whitespace that is held back until the next text is known."""
        return "".join(self._blank)

    def take(self) -> list[ChatEvent]:
        if self.partial:
            self._release()
        events, self._events = self._events, []
        return events

    def _release(self) -> None:
        self._events += self._open
        self._open = []

    def write(self, text: str) -> None:
        """Add text to the current kind of output: answer or reasoning."""
        if not text:
            return
        self.markdown.feed(text)
        self._latest = (self._latest + text[-2:])[-2:]
        # Commas may separate calls.
        separators = " \t\r\n,;" if self.called else None
        at_once = (self.last_block or self.markdown.fenced) and not self.reasoning
        whole = text if at_once else text.rstrip("\r\n")
        if not (text.strip(separators) if self.fresh else whole):
            self._blank.append(text)
            return
        end = len(whole)
        lead = "".join(self._blank)
        if self.after_block and self._kind not in self._written:
            shown = _FIRST_BREAKS.sub("", lead + text[:end])
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
        """Begin a call of this name; `send` adds the certain part of its arguments.

        The name is sent with the first key, because before that many texts turn out to be no call.
        """
        self._begun = Call(name, "", identity)

    def send(self, text: str) -> None:
        """Add to the arguments of the open call, if there is one.

        A closing brace is held back until more follows, so that the arguments of a call are valid
        JSON only if the call is complete.
        """
        if not self._begun:
            return
        text = self._unsent + text
        end = len(text) - text.endswith("}")
        self._put(text[:end])
        self._unsent = text[end:]

    def _put(self, text: str) -> None:
        """Send a part of the open call's arguments, after its name if it is the first part."""
        begun = self._begun
        if begun and not self._sent:
            identity = begun.id
            if not identity or identity in self._ids:
                identity = f"call_{os.urandom(16).hex()}"
            self._ids.add(identity)
            self._open.append(ToolCallStart(self.calls, identity, begun.name))
        if text:
            self._open.append(ToolCallArguments(self.calls, text))
            self._sent += len(text)

    def call(self, call: Call) -> None:
        """Complete a call; sends the part that has not been sent."""
        self.edge()
        self._begun = self._begun or call
        self._put(call.arguments[self._sent :])
        self.called = True
        self.abandon()

    def abandon(self, *, cut: bool = False) -> None:
        """End the open call, if there is one. `cut`: the length limit ended it."""
        if cut and not self.partial:
            self._open = []
        self._release()
        self.calls += bool(self._sent)
        self._begun, self._sent, self._unsent = None, 0, ""

    def flush(self) -> None:
        """End the text: trailing whitespace is output unless there is nothing else."""
        if not self.after_block and (text := "".join(self._blank)):
            self._events.append(self._kind(text))
        self._blank = []
