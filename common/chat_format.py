"""Describes the format in which a model writes reasoning and tool calls.

Options set the format (`tool_parser:`, `reasoning_parser:`, with names that other serving engines
use too); without them it is detected from markers in the chat template and the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from common.formats import families
from common.formats.reading import Tags
from common.formats.shapes import Shape
from common.formats.tagged_text import TaggedText
from common.wording import did_you_mean, folded


@dataclass(frozen=True)
class ChatFormat:
    """The markers and the grammar of one model family's output.

    name: the name of the family's tool parser.
    shape: how calls are written, if no family has that name.
    """

    name: str
    grammar: TaggedText
    shape: Shape | None = None

    @classmethod
    def named(cls, tool_parser: str | None, reasoning_parser: str | None = None) -> ChatFormat:
        """Return the format for two parser names; either may be omitted.

        Raises ValueError for an unknown name, with a message that suggests a similar known name.
        """
        tool, reasoning = folded(tool_parser or ""), folded(reasoning_parser or "")
        if tool and tool not in families.BY_NAME:
            raise ValueError(_unknown("tool_parser", tool_parser or "", families.BY_NAME))
        if reasoning and reasoning not in families.REASONING:
            raise ValueError(
                _unknown("reasoning_parser", reasoning_parser or "", families.REASONING)
            )
        if not tool and reasoning in families.HARMONY_REASONING:
            tool = "openai"
        return cls(tool or "plain", families.grammar_of(tool or "plain"))._with_tags(
            families.REASONING[reasoning] if reasoning else ()
        )

    @staticmethod
    def knows_tool_parser(name: str) -> bool:
        """Return whether there is a format of this name."""
        return folded(name) in families.BY_NAME

    @classmethod
    def detect(cls, chat_template: str | None, vocabulary: Collection[str]) -> ChatFormat:
        """Return the format whose markers occur in the template, or else in the vocabulary."""
        tool = families.tool_parser(chat_template or "", vocabulary)
        tags = families.reasoning_tags(chat_template or "", vocabulary)
        return cls(tool, families.grammar_of(tool))._with_tags(tags)

    def with_reasoning_of(self, other: ChatFormat) -> ChatFormat:
        """Return a format with the tool calls of this format and the reasoning tags of `other`."""
        return self._with_tags(other.grammar.tags)

    def with_calls_of(self, other: ChatFormat) -> ChatFormat:
        """Return a format with the tool calls of `other` and the reasoning tags of this format."""
        return replace(other, grammar=other.grammar.having(self.grammar.tags))

    @property
    def strict(self) -> ChatFormat:
        """This format, but without the calls of other families that it also reads."""
        return replace(self, grammar=replace(self.grammar, foreign=()))

    def varies(self, other: ChatFormat) -> bool:
        """Return whether `other` has another name, but is read in the same way."""
        calls, others = self.grammar.calls, other.grammar.calls
        return self.name != other.name and bool(calls) and calls == others

    @property
    def thinks(self) -> bool:
        return bool(self.grammar.tags)

    @cached_property
    def markers(self) -> frozenset[str]:
        """The markers around reasoning and calls."""
        grammar = self.grammar
        tags = [marker for pair in grammar.tags for marker in (pair.opening, pair.closing)]
        return frozenset((*tags, *grammar.openers, *grammar.closers))

    @property
    def reasoning_markers(self) -> tuple[str, str] | None:
        """The start and end tags of reasoning."""
        tags = self.grammar.tags
        return (tags[0].opening, tags[0].closing) if tags else None

    @property
    def tool_call_markers(self) -> tuple[str, str] | None:
        """The start and end markers of a call or a section of calls; the end may be ''."""
        openers, closers = self.grammar.openers, self.grammar.closers
        return (openers[0], closers[0] if closers else "") if openers else None

    def _with_tags(self, tags: Sequence[Tags]) -> ChatFormat:
        return replace(self, grammar=self.grammar.with_tags(tags))


def _unknown(option: str, value: str, known: Collection[str]) -> str:
    return f"{option} {value!r} is not known{did_you_mean(value, known)}; known: " + ", ".join(
        sorted(known)
    )
