"""Divides an answer into blocks that follow each other: reasoning, text, and one for each call.

Every API shows these blocks; each has a renderer that writes their steps in the API's own words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from common.chat_events import is_whole
from gateway.calls import Done, Event, Piece, ToolCallPiece

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A block of an answer that is being generated.

    place: its index among the blocks.
    call: the first part of a call, which has its id and name.
    custom: whether it calls a tool that accepts plain text, which the model writes as the only
        argument of a function.
    parts: the text, or the arguments.
    whole: for a call that has ended, whether its arguments are complete.
    """

    kind: Kind
    place: int
    call: ToolCallPiece
    custom: bool = False
    parts: list[str] = field(default_factory=list)
    whole: bool = True
    _arguments: str = ""  # a custom call's input so far
    _sent: int = 0  # characters of its text

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, text: str) -> str:
        """Add what was generated. Returns what that adds to the block's text."""
        if self.custom:
            self._arguments += text
            text = self._next(_text_in(self._arguments) or "")
        self.parts.append(text)
        return text

    def end(self, *, cut: bool) -> str:
        """End the block. Returns the arguments of a custom call that have another form.

        cut: whether the answer has reached a limit.
        """
        if self.kind == "call":
            self.whole = is_whole(self._arguments if self.custom else self.text)
        other = self.custom and not self._sent and _text_in(self._arguments) is None
        rest = self._next(self._arguments) if other and (self.whole or not cut) else ""
        self.parts.append(rest)
        return rest

    def _next(self, text: str) -> str:
        start, self._sent = self._sent, max(self._sent, len(text))
        return text[start:]


@dataclass(frozen=True, slots=True)
class Step:
    """One change of a block: its beginning, growth or end."""

    verb: Literal["begin", "grow", "end"]
    block: Block
    text: str  # what the change adds to the block


class Blocks:
    """The blocks of one answer. Pass every event of its generation to `take`."""

    def __init__(self, custom: Collection[str] = ()) -> None:
        """Start without blocks.

        custom: the names of the tools that accept plain text.
        """
        self.all: list[Block] = []
        self.open: Block | None = None
        self.done: Done | None = None
        self._custom = custom
        self._calls: dict[int, Block] = {}

    def take(self, event: Event) -> Iterator[Step]:
        """Yield the steps of an event, in order; the caller must consume all of them."""
        if isinstance(event, Piece):
            if event.reasoning:
                yield from self.add("reasoning", event.reasoning)
            if event.content:
                yield from self.add("text", event.content)
            for part in event.tool_calls:
                yield from self._call(part)
        elif isinstance(event, Done):
            self.done = event
            yield from self.close(cut=event.finish_reason == "length")

    def add(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[Step]:
        if self.open is not None and self.open.kind == kind:
            yield Step("grow", self.open, self.open.add(text))
        else:
            yield from self._begin(kind, ToolCallPiece(-1), text)

    def close(self, *, cut: bool) -> Iterator[Step]:
        """End the open block.

        cut: the answer has reached a limit, perhaps within a call.
        """
        block, self.open = self.open, None
        if block is not None:
            yield Step("end", block, block.end(cut=cut))

    def text_of(self, kind: Kind) -> str:
        return "".join(block.text for block in self.all if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        """The complete calls of an answer that has ended."""
        return [block for block in self.all if block.kind == "call" and block.whole]

    def _call(self, part: ToolCallPiece) -> Iterator[Step]:
        if block := self._calls.get(part.index):
            yield Step("grow", block, block.add(part.arguments))
        else:
            yield from self._begin("call", part, part.arguments)

    def _begin(self, kind: Kind, call: ToolCallPiece, text: str) -> Iterator[Step]:
        yield from self.close(cut=False)
        custom = kind == "call" and call.name in self._custom
        self.open = block = Block(kind, len(self.all), call, custom)
        self.all.append(block)
        if kind == "call":
            self._calls[call.index] = block
        yield Step("begin", block, block.add(text))


def consume(blocks: Blocks, event: Event) -> None:
    """Add an event whose steps are not shown."""
    for _ in blocks.take(event):
        pass


def _text_in(arguments: str) -> str | None:
    """Return the text of a custom tool's call so far; None if the arguments have another form."""
    try:
        found: Any = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return None
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else None
