"""Which family's way of writing reasoning and tool calls a model follows.

A format is named by the options of a host (`tool_parser:`, `reasoning_parser:`, with the names
that serving engines share) or detected from the markers in a chat template and a vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from common.formats import detection, families
from common.formats.blocks import Block
from common.formats.cursor import Wait
from common.formats.harmony import Harmony
from common.formats.reading import Reading, Tags
from common.formats.tagged_text import TaggedText
from common.wording import did_you_mean, folded


class Grammar(Protocol):
    """How a family's answers are read, and the markers that say where its blocks are."""

    @property
    def tags(self) -> tuple[Tags, ...]: ...
    @property
    def openers(self) -> tuple[str, ...]: ...
    @property
    def closers(self) -> tuple[str, ...]: ...
    def read(self, reading: Reading) -> Wait[None]: ...


@dataclass(frozen=True)
class ChatFormat:
    """Markers and grammar of one family's output. `name` is that of its tool parser."""

    name: str
    grammar: Grammar

    @classmethod
    def named(cls, tool_parser: str | None, reasoning_parser: str | None = None) -> ChatFormat:
        """The format that two parser names stand for; either may be left out.

        Raises ValueError, with the nearest known name, for a name that nobody knows.
        """
        tool, reasoning = folded(tool_parser or ""), folded(reasoning_parser or "")
        if tool and tool not in families.TOOLS:
            raise ValueError(_unknown("tool_parser", tool_parser or "", families.TOOLS))
        if reasoning and reasoning not in families.REASONING:
            raise ValueError(
                _unknown("reasoning_parser", reasoning_parser or "", families.REASONING)
            )
        if not tool and reasoning in families.HARMONY_REASONING:
            tool = "openai"
        return cls(tool or "plain", families.TOOLS[tool or "plain"])._with_tags(
            families.REASONING[reasoning] if reasoning else ()
        )

    @staticmethod
    def knows_tool_parser(name: str) -> bool:
        """Whether a format has this name."""
        return folded(name) in families.TOOLS

    @classmethod
    def detect(cls, chat_template: str | None, vocabulary: Collection[str]) -> ChatFormat:
        """The format whose markers the template writes, or else the vocabulary has."""
        tool = detection.tool_parser(chat_template or "", vocabulary)
        tags = detection.reasoning_tags(chat_template or "", vocabulary)
        return cls(tool, families.TOOLS[tool])._with_tags(tags)

    @classmethod
    def of_blocks(
        cls,
        name: str,
        opener: str,
        closer: str,
        parse: Callable[[str, Sequence[Mapping[str, Any]]], Any],
        reasoning: Sequence[tuple[str, str]] = (),
    ) -> ChatFormat:
        """A format whose completed blocks a given function reads: for families of other libraries.

        The function gets a block's inside and the tools, and returns a call or a list of calls as
        dicts with `name`, `arguments` and perhaps `id`; what it raises makes the block content.
        """
        tags = tuple(Tags(opening, closing) for opening, closing in reasoning)
        return cls(name, Block(opener, closer, parse).grammar(tags))

    def with_reasoning_of(self, other: ChatFormat) -> ChatFormat:
        """This format's tool calls with the reasoning tags of another."""
        return self._with_tags(other.grammar.tags)

    def with_calls_of(self, other: ChatFormat) -> ChatFormat:
        """This format's reasoning with the tool calls of another, and its name."""
        if not isinstance(other.grammar, TaggedText):
            return other
        return replace(other, grammar=replace(other.grammar, tags=self.grammar.tags))

    @property
    def thinks(self) -> bool:
        return bool(self.grammar.tags)

    @property
    def reasoning_markers(self) -> tuple[str, str] | None:
        """The opening and closing tag of reasoning."""
        tags = self.grammar.tags
        return (tags[0].opening, tags[0].closing) if tags else None

    @property
    def tool_call_markers(self) -> tuple[str, str] | None:
        """What opens and what closes a call or a section of calls; the close may be ''."""
        openers, closers = self.grammar.openers, self.grammar.closers
        return (openers[0], closers[0] if closers else "") if openers else None

    def _with_tags(self, tags: Sequence[Tags]) -> ChatFormat:
        grammar = self.grammar
        if isinstance(grammar, Harmony) or not isinstance(grammar, TaggedText):
            return self
        return replace(self, grammar=grammar.with_tags(tags))


def _unknown(option: str, value: str, known: Collection[str]) -> str:
    return f"{option} {value!r} is not known{did_you_mean(value, known)}; known: " + ", ".join(
        sorted(known)
    )
