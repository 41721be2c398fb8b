"""A family: what a checkpoint of it is recognised by, and how it writes reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from common.formats.harmony import Harmony
from common.formats.reading import CallSyntax, Tags
from common.formats.shapes import JsonShape, Shape, TagShape
from common.formats.tagged_text import TaggedText

THINK = Tags("<think>", "</think>")


@dataclass(frozen=True, eq=False)
class Family:
    """One description, from which the parser, the call grammar and the detection come.

    names: the values of `tool_parser:`, of which the first is the format's name. shape: how calls
    are written; None if the family has none. signs: sets of texts, any of which shows the family in
    a chat template or a vocabulary. reasoning: the values of `reasoning_parser:`. calls: how calls
    are read, if not only as they are written. by_token: another shape for models with this token.
    text: the parser, if it is code. The others are fields of `TaggedText`.
    """

    title: str
    names: str = ""
    shape: Shape | None = None
    signs: Sequence[tuple[str, ...]] = ()
    tags: tuple[Tags, ...] = (THINK,)
    reasoning: str = ""
    calls: tuple[CallSyntax, ...] = ()
    by_token: tuple[str, JsonShape] | None = None
    text: TaggedText | Harmony | None = None
    late_tags: tuple[Tags, ...] = ()
    answers: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    inline: tuple[str, ...] = ()
    starts_line: bool = False

    @cached_property
    def grammar(self) -> TaggedText | Harmony:
        """The parser of the family's answers."""
        if self.text:
            return self.text
        calls = self.calls
        if not calls and isinstance(self.shape, JsonShape | TagShape):
            calls = self.shape.syntaxes
        return TaggedText(
            self.tags,
            self.late_tags,
            calls,
            self.silent,
            self.answers,
            self.inline,
            self.starts_line,
        )
