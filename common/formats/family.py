"""A family: what a checkpoint of it is recognised by, and how it writes reasoning and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from common.formats.cursor import Wait
from common.formats.json_calls import read_bare_calls
from common.formats.reading import CallSyntax, Reading, Tags, begins_line, no_content_yet
from common.formats.shapes import JsonShape, Shape, TagShape
from common.formats.tag_spelling import openings
from common.formats.tagged_text import TaggedText

THINK = Tags("<think>", "</think>")


@dataclass(frozen=True, eq=False)
class Family:
    """The description of a family, from which its parser, call grammar and detection are made.

    The others are fields of `TaggedText`.

    names: the values of `tool_parser:`, of which the first is the format's name.
    shape: how calls are written; None if the family has none.
    signs: sets of texts, any of which shows the family in a chat template or a vocabulary.
    reasoning: the values of `reasoning_parser:`.
    calls: how calls are read, if not only as they are written.
    by_token: another shape for models with this token.
    text: the parser, for a family that needs its own code.
    """

    title: str
    names: str = ""
    shape: Shape | None = None
    signs: Sequence[tuple[str, ...]] = ()
    tags: tuple[Tags, ...] = (THINK,)
    reasoning: str = ""
    calls: tuple[CallSyntax, ...] = ()
    by_token: tuple[str, JsonShape] | None = None
    text: TaggedText | None = None
    late_tags: tuple[Tags, ...] = ()
    answers: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    inline: tuple[str, ...] = ()
    starts_line: bool = False
    tight: tuple[tuple[str, str], ...] = ()

    @cached_property
    def grammar(self) -> TaggedText:
        """The parser of the family's answers."""
        if self.text:
            return self.text
        calls = self.calls or (self.shape.syntaxes if self.shape else ())
        calls = (*calls, *map(_without_a_bracket, calls), *_unmarked(self.shape, calls))
        return TaggedText(
            self.tags,
            self.late_tags,
            calls,
            self.silent,
            self.answers,
            self.inline,
            self.starts_line,
            self.tight,
        )


def _without_a_bracket(syntax: CallSyntax) -> CallSyntax:
    """Return the syntax for openers without some of their brackets, at a line's beginning.

    A word without any bracket is no opener.
    """
    openers = [form for opener in syntax.openers if syntax.marked for form in openings(opener)]
    found = (form for form in openers if form not in syntax.openers and not form.isalnum())
    return replace(syntax, openers=tuple(found), begins=begins_line, by_name=False, broken=True)


def _unmarked(shape: Shape | None, calls: Sequence[CallSyntax]) -> Iterator[CallSyntax]:
    """Calls as JSON without the marker before them, at the beginning of the answer.

    There are none if another syntax begins with a brace.
    """
    if not isinstance(shape, JsonShape | TagShape):
        return
    openers = [opener for syntax in calls for opener in syntax.openers]
    if calls and "{" not in openers:
        listed = ("[",) if "[" in shape.opening else ()
        yield CallSyntax(("{", *listed), _bare(calls[0].closers), begins=no_content_yet)


@cache  # so that equal closing markers give the same object
def _bare(closers: tuple[str, ...]) -> Callable[[Reading], Wait[None]]:
    return partial(read_bare_calls, closers=closers)
