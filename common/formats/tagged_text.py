"""The grammar that most families share: reasoning between tags, marked calls, and text.

A marker counts only if it is not quoted. A reasoning tag that is ordinary text opens reasoning only
if no content has come since the last block; a quoted call (in a code block, in inline code, in a
sentence of reasoning) is text. Text that turns out not to be a call is put back and read again as
text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from common.formats.cursor import (
    END_TOKENS,
    SPACE,
    Cut,
    Markers,
    Unreadable,
    Wait,
    markers_of,
)
from common.formats.json_calls import may_be_bare
from common.formats.markdown import Markdown
from common.formats.reading import CLOSING_QUOTES, CallSyntax, Reading, Tags, is_quoted

_TURNS = re.compile(
    r"<\|(?:im_start|im_end|im_user|im_assistant|im_middle|user|assistant|observation|eot_id)\|>"
    r"|<\|(?:start_header_id|end_header_id|header_start|header_end|start_of_role|end_of_role)\|>"
    r"|<｜(?:User|Assistant)｜>|<\|turn>|<start_of_turn>|\[/INST\]|<\|open\|>message|\]~b\]"
    r"|<\|begin_assistant\|>"
)
"""Markers that begin a turn in a prompt; tags before the last one belong to earlier turns."""


_HEADERS = (
    *("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>", "<|assistant|>"),
    *("<|header_start|>assistant<|header_end|>", "<start_of_turn>model", "<|turn>model"),
    *("<｜Assistant｜>", "<|start_of_role|>assistant<|end_of_role|>"),
    "<|im_assistant|>assistant<|im_middle|>",
)
"""The beginning of the model's turn, which it may repeat."""
_ELEMENT = re.compile(r"</?[a-z]+>")
_REST_OF_CODE = re.compile(r"[^`\n]*")  # inline code ends on its line
_ATTRIBUTES = re.compile(r"[\d:,\[\] ]*")


@dataclass(frozen=True, eq=False)
class TaggedText:
    """A family's markers for the shared grammar."""

    tags: tuple[Tags, ...] = ()
    late_tags: tuple[Tags, ...] = ()
    """Tags whose opening is also the beginning of other markers: the next character decides."""
    calls: tuple[CallSyntax, ...] = ()
    silent: tuple[str, ...] = ()
    """Markup that produces no output."""
    answers: tuple[str, ...] = ()
    """More silent markers, which begin the answer and so close open reasoning."""
    inline: tuple[str, ...] = ()
    """Beginnings of tags inside text. The tags are removed, and what they surround stays."""
    starts_line: bool = False
    """The template begins every answer with a line break, which is also a separator."""
    tight: tuple[tuple[str, str], ...] = ()
    """Marks that begin a tag, and the ends of these tags; space at the edges between them means
    nothing.
    """
    foreign: tuple[CallSyntax, ...] = ()
    """How models of other families write calls; they are tried after the family's own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "silent", tuple(dict.fromkeys((*self.silent, *self.answers))))

    @cached_property
    def _plain(self) -> tuple[str, ...]:
        """The markers of reasoning and of silent and inline markup."""
        tags = (*self.tags, *self.late_tags)
        found = [marker for pair in tags for marker in (pair.opening, pair.closing)]
        return tuple(filter(None, [*found, *self.silent, *self.inline]))

    @cached_property
    def _own(self) -> tuple[str, ...]:
        calls = [marker for c in self.calls for marker in (*c.openers, *c.closers)]
        return (*self._plain, *filter(None, calls))

    @cached_property
    def _has_one_answer(self) -> bool:
        """Whether no markup but calls can follow the beginning of the answer."""
        anywhere = any(tags.anywhere for tags in (*self.tags, *self.late_tags))
        return not (anywhere or self.silent or self.inline)

    @cached_property
    def _others(self) -> frozenset[str]:
        """What opens calls only in other families."""
        openers = {opener for c in self.foreign for opener in c.openers}
        return frozenset(o for o in openers.difference(self._own) if not o.startswith(self._plain))

    @cached_property
    def _by_name(self) -> bool:
        return any(syntax.by_name for syntax in (*self.calls, *self.foreign))

    @cached_property
    def _marked(self) -> Markers:
        """Markers whose beginning is dropped if the length limit cuts it, because it is no word."""
        calls = [opener for c in self.calls if c.marked for opener in c.openers]
        return Markers(m for m in (*self._plain, *calls) if m and not m[0].isalnum())

    @property
    def openers(self) -> tuple[str, ...]:
        return tuple(o for syntax in self.calls if not syntax.broken for o in syntax.openers)

    @property
    def closers(self) -> tuple[str, ...]:
        return self.calls[0].closers if self.calls else ()

    def with_tags(self, tags: Iterable[Tags]) -> TaggedText:
        """Return the same family with additional reasoning tags, which are tried first."""
        return self.having(dict.fromkeys((*tags, *self.tags)))

    def having(self, tags: Iterable[Tags]) -> TaggedText:
        """Return the same family with these reasoning tags instead."""
        tags = tuple(tags)
        return self if tags == self.tags else replace(self, tags=tags)

    def read(self, reading: Reading) -> Wait[None]:
        answer = reading.answer
        self._begin(reading)
        markers = self._markers(reading)
        answer.last_block = not reading.tools and self._has_one_answer

        while marker := (
            yield from reading.until(markers, lambda text: reading.write(text, self._marked))
        ):
            if self._is_cut(reading):
                reading.rest()
                answer.edge()
            elif not (yield from self._block(reading, marker)):
                opens = any(marker in syntax.openers for syntax in (*self.calls, *self.foreign))
                reading.opener_is_text = reading.opener_is_text or opens
                answer.write(reading.take(len(marker)))

    def _is_cut(self, reading: Reading) -> bool:
        """Return whether the length limit left only the beginning of a longer marker."""
        rest = reading.pending
        return (
            reading.was_cut()
            and len(rest) > 1
            and not reading.answer.markdown.quoted
            and not self._marked.open_end(rest)
        )

    def _markers(self, reading: Reading) -> Markers:
        if not reading.tools:
            return markers_of(*self._plain)
        return _all_markers(self, tuple(reading.tools.names) if self._by_name else ())

    def _begin(self, reading: Reading) -> None:
        """Start in the state that the prompt ends in: inside reasoning, after it, or in text."""
        tail = _TURNS.split(reading.prompt_tail)[-1]
        for tags in self.tags:
            opened, closed = tail.rfind(tags.opening), tail.rfind(tags.closing)
            if opened > closed:
                reading.closing = tags.closing
                if tail[opened + len(tags.opening) :].strip():
                    reading.answer.exact(reasoning=True)
                else:
                    reading.answer.edge(reasoning=True)
                return
            if closed >= 0 and not tail[closed + len(tags.closing) :].strip():
                reading.answer.edge()
                return
        if self.starts_line:
            reading.answer.edge()

    def _block(self, reading: Reading, marker: str) -> Wait[bool]:
        """Read the marker if it counts here; returns whether it did."""
        for tags in (*self.tags, *self.late_tags):
            if marker == tags.opening and self._opens(reading, tags):
                reading.closing = tags.closing
                return self._edge(reading, marker, reasoning=True)
            if marker == tags.closing and (yield from self._closes(reading, tags)):
                return self._edge(reading, marker, reasoning=False)
        if marker in self.answers and reading.answer.reasoning:
            quoted = yield from is_quoted(reading, marker)
            reading.wrapped = not quoted
            return not quoted and self._edge(reading, marker, reasoning=False)
        answer = reading.answer
        called, failed = answer.calls, False
        named = marker in reading.tools and marker not in self._others
        for syntax, opener in _syntaxes_of(self, marker):
            opener = opener or (marker if named and syntax.by_name else "")
            if opener and syntax.begins(reading, opener) and (syntax.foreign or not failed):
                if (yield from self._calls(reading, syntax, opener)):
                    return True
                failed = True
                if answer.calls != called:
                    break  # the beginning of a call was sent
            elif len(opener) > 1 and not (syntax.foreign or syntax.broken or failed):
                break  # the family's own marker, where it does not count
            elif marker in syntax.closers and not failed:
                alone = not answer.called and not (yield from self._is_stray(reading, marker))
                if not alone and not answer.markdown.quoted:
                    return self._edge(reading, marker)
                if reading.broken:
                    # What looked like code in a malformed call ends with it.
                    answer.write(reading.take(len(marker)))
                    answer.markdown, reading.broken = Markdown(), False
                    return True
        if marker in self.inline:
            return (yield from self._inline(reading, marker))
        repeated = answer.fresh and marker in (*_HEADERS, *(END_TOKENS if answer.called else ()))
        silent = repeated or (yield from self._is_silent(reading, marker))
        if not silent or answer.markdown.quoted:
            return False
        return self._edge(reading, marker)

    def _is_silent(self, reading: Reading, marker: str) -> Wait[bool]:
        """Return whether the marker is silent here; an element only if it is around the answer."""
        if marker not in self.silent or not _ELEMENT.fullmatch(marker):
            return marker in self.silent
        answer = reading.answer
        if marker[1] == "/":
            behind = (yield from reading.peek(len(marker) + 1))[len(marker) :]
            counts = reading.wrapped and behind in ("", "\n", "<")
        else:
            counts = answer.fresh if marker in self.answers else answer.after_block
        reading.wrapped = reading.wrapped or counts
        return counts

    def _is_stray(self, reading: Reading, marker: str) -> Wait[bool]:
        """Return whether a closing marker at the end of a line closes nothing in the text."""
        if reading.opener_is_text or reading.answer.reasoning:
            return False
        return (yield from reading.peek(len(marker) + 1))[len(marker) :] in ("", "\n")

    def _inline(self, reading: Reading, marker: str) -> Wait[bool]:
        """Read a tag inside text up to its `>`; returns False if the marker begins no tag."""
        with reading.ahead() as keep:
            reading.take(len(marker))
            if not marker.endswith(">"):
                yield from reading.run(_ATTRIBUTES)
                closed = yield from reading.accept(">")
                if not closed and ((yield from reading.more()) or not reading.was_cut()):
                    return False
            if reading.answer.markdown.quoted:
                return False
            keep()
        return True

    def _edge(self, reading: Reading, marker: str, *, reasoning: bool | None = None) -> bool:
        reading.take(len(marker))
        reading.answer.edge(reasoning=reasoning)
        return True

    def _opens(self, reading: Reading, tags: Tags) -> bool:
        """Return whether the tag opens reasoning; a repetition of the prompt's tag does not."""
        if reading.answer.fresh:
            return True
        return tags.anywhere and not reading.answer.reasoning and not reading.answer.markdown.quoted

    def _closes(self, reading: Reading, tags: Tags) -> Wait[bool]:
        """Return whether the tag closes reasoning, or repeats the end of empty reasoning.

        A dedicated token that closes nothing is never a part of the answer.
        """
        if not reading.answer.reasoning:
            stray = tags.anywhere and not reading.answer.markdown.quoted
            return reading.answer.fresh or stray
        return not (yield from is_quoted(reading, tags.closing))

    def _calls(self, reading: Reading, syntax: CallSyntax, opener: str) -> Wait[bool]:
        answer = reading.answer
        if answer.markdown.fenced:
            # A code block with calls in it is not a part of a malformed one.
            reading.broken = reading.broken and syntax.foreign
            return False
        if not reading.worth_trying():
            return False
        mentioned = answer.reasoning and answer.quotes
        in_code = answer.markdown.quoted
        own_line = answer.markdown.line_start
        ends = syntax.last or (syntax.foreign and (answer.reasoning or not own_line))
        careful = answer.reasoning or in_code or ends or answer.quotes
        reading.opener, reading.offered = opener, syntax.foreign
        reading.pending_calls = [] if careful else None
        start, quoted = reading.position, 0
        try:
            with reading.attempt():
                if syntax.marked and (yield from reading.follow(opener, SPACE, opener)):
                    yield from reading.accept_all(opener, SPACE)
                yield from syntax.read(reading)
                length = reading.position - start
                if ends and not (yield from reading.is_last()):
                    raise Unreadable
                if (
                    mentioned
                    or (answer.quotes and (yield from reading.peek()) in CLOSING_QUOTES)
                    or (in_code and (yield from reading.follow(_REST_OF_CODE, "`")))
                    or (
                        answer.reasoning
                        and not (yield from self._are_real_calls(reading, own_line))
                    )
                ):
                    quoted = length
                    raise Unreadable
        except Cut:
            certain = reading.begun and (own_line or not careful) and not in_code
            if own_line and not (syntax.marked or careful):
                begun = reading.pending.removeprefix(opener if len(opener) > 1 else "")
                certain = certain or may_be_bare(begun, reading.tools.names)
            # After a call, a lone opener at the end is meant as the call's end.
            closes = answer.called and reading.pending.strip() == opener
            marked = syntax.marked and not careful
            if (marked and closes) or (reading.was_cut() and (certain or marked)):
                reading.rest()
                answer.edge()
            elif careful or syntax.broken:
                return False
            else:
                answer.write(reading.rest())
            return True
        except Unreadable:
            # The whole block is text: a call inside a quoted block is quoted too.
            answer.write(reading.take(quoted))
            reading.broken = reading.broken or (syntax.marked and not careful)
            return bool(quoted) or reading.settled
        finally:
            pending, reading.pending_calls = reading.pending_calls, None
            reading.begun = reading.offered = False
        for call in pending or ():
            answer.call(call)
        reading.broken = False
        answer.edge()
        yield from reading.drop_cut(syntax.closers)
        return True

    def _are_real_calls(self, reading: Reading, own_line: bool) -> Wait[bool]:
        """Return whether calls inside reasoning are real, and not an example in a sentence."""
        if not all(call.name in reading.tools for call in reading.pending_calls or ()):
            return False
        if own_line or (yield from reading.peek()) in ("", "\n"):
            return True
        yield from reading.space()
        ends = [tags.closing for tags in self.tags] + [o for c in self.calls for o in c.openers]
        return bool((yield from reading.at(ends)))


@lru_cache(maxsize=32)
def _all_markers(family: TaggedText, names: tuple[str, ...]) -> Markers:
    """Return all markers, and the names of tools. Few are stored: each load has its own family."""
    return Markers({*family._own, *family._others, *END_TOKENS, *_HEADERS, *names})


@lru_cache(maxsize=1024)
def _syntaxes_of(family: TaggedText, marker: str) -> tuple[tuple[CallSyntax, str], ...]:
    """Return the syntaxes that a marker opens or closes, and those that names of tools open.

    Each has its opener; '' if it has none there.
    """
    # What opens only other families' calls may begin with one of the family's own openers.
    foreign = marker in family._others
    found: list[tuple[CallSyntax, str]] = []
    for syntax in (*family.calls, *family.foreign):
        opener = marker if marker in syntax.openers else ""
        if foreign and not syntax.broken:
            opener = next(filter(marker.startswith, syntax.openers), "")
        if opener or syntax.by_name or marker in syntax.closers:
            found.append((syntax, opener))
    return tuple(found)
