"""gpt-oss and Beam: messages whose headers give their channel and recipient.

The answer begins inside a header that the prompt opened, and ends without the token that stopped
it. The channel `analysis` is reasoning, a message to `functions.NAME` is a call, and the rest is
content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from common.formats.answer import Answer, Call
from common.formats.cursor import SPACE, Cursor, Cut, Markers, Unreadable, Wait
from common.formats.json_calls import read_arguments, read_bare_calls
from common.formats.reading import Reading, Tags, is_quoted
from common.formats.tag_spelling import openings
from common.formats.tagged_calls import CallTags, Tag
from common.formats.tagged_text import TaggedText
from common.formats.tool_schema import arguments_of
from common.formats.values import MODEL_JSON, read_value

_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ROLE, _CONSTRAIN, _RECIPIENT = "assistant", "<|constrain|>", "to="
_CHANNELS = ("analysis", "commentary", "final")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_NEXT_PART = (_START, _CHANNEL)
_BODY_ENDS = Markers([*_NEXT_PART, *_ENDS])
_FUNCTIONS = "functions."
_SPELT = {
    form: mark for mark in (_START, _CHANNEL, _CONSTRAIN, _MESSAGE) for form in openings(mark)
}
"""The marks, also without some of their brackets."""
_BARE_PARTS = (_ROLE, *_CHANNELS, "json", "code", _RECIPIENT, _FUNCTIONS)
_AFTER_CHANNEL = (_MESSAGE, _CHANNEL, _CONSTRAIN, _RECIPIENT, "json", "code")
_PARTS = (*_SPELT, *_BARE_PARTS)
_BODY_BEGINS = (*(form for form, mark in _SPELT.items() if mark != _START), "{")
_NEXT = Markers([_START])
_NAME = re.compile(r"[^\s<{]*")
_HEADER_WORDS = re.compile(r"[\w .=\"'-]*")
_TO_FUNCTION = re.compile(
    r"""\s*(?:assistant)?\s*(?:analysis|commentary|final|)\s*(?:to=|functions\.)["']?([\w.-]+)["']?"""
    r"\s*(?:json|code)?\s*"
)
"""A header without markup."""
_SURELY_TEXT = re.compile(r'[^{}"<]*')
_JUNK = re.compile(r"(?:(?![<{\n])[\W\d_])*")
_FORMAT = re.compile(r"[\w/.+-]*")
_QUOTED = re.compile(r"[\w .=<|>-]*")
_BEGUN_CALL = re.compile(r"\s*(?:assistant)?\s*to=functions\.[\w. -]*(?:<[|\w]*)?")
"""The header of a call, before the markup that shows it to be one."""
_PEOPLE = frozenset({"assistant", "user", "all"})
_BEAM = CallTags(
    call=_START,
    call_close="<|call|>",
    parameter="<rfl:parameter",
    parameter_close="</rfl:parameter>",
    block_close="<|end|>",
    lines="dropped",
)
"""Beam writes the arguments of a call in tags. What ends a message ends the last of them."""


@dataclass
class _Header:
    """A parsed header.

    marked: whether it was recognised by markup, not only by words.
    whole: whether its end has been read.
    """

    channel: str = ""
    recipient: str = ""
    marked: bool = False
    whole: bool = False


@dataclass(frozen=True, eq=False)
class Harmony(TaggedText):
    """The grammar; its markers are the same for all models of the family."""

    tags: tuple[Tags, ...] = (Tags("<|channel|>analysis<|message|>", "<|end|>", anywhere=True),)

    @property
    def openers(self) -> tuple[str, ...]:
        return ("<|channel|>commentary to=functions.",)

    @property
    def closers(self) -> tuple[str, ...]:
        return ("<|call|>",)

    def having(self, _tags: Iterable[Tags]) -> Harmony:
        return self

    def read(self, reading: Reading) -> Wait[None]:
        turn = reading.prompt_tail.rpartition(_START)[2]
        prompted = _header_in(turn)
        if _MESSAGE in turn:
            yield from self._body(reading, prompted)
            prompted = _Header()
        while (yield from reading.more()):
            yield from self._message(reading, prompted)
            prompted = _Header()

    def _message(self, reading: Reading, header: _Header) -> Wait[None]:
        answer = reading.answer
        try:
            with reading.attempt():
                yield from self._header(reading, header)
                if header.recipient:
                    yield from self._call(reading, header.recipient)
        except Cut:
            rest = reading.rest()
            cut = reading.was_cut()
            if cut and reading.tools and _BEGUN_CALL.fullmatch(rest):
                answer.edge()
            elif not header.marked or (header.whole and not cut):
                _begin(answer, header)
                reading.write(rest, _BODY_ENDS)
        except Unreadable:
            yield from self._other(reading, header)
        else:
            if not header.recipient:
                yield from self._body(reading, header)

    def _header(self, reading: Reading, header: _Header) -> Wait[None]:
        """Read the header between a message's start and its text, whose marker may be missing."""
        while True:
            space, part = (yield from reading.follow(SPACE, _PARTS)) or ("", "")
            if not part and header.marked and (yield from self._skips_junk(reading)):
                continue
            words = part in _BARE_PARTS and not header.marked  # other words may come here
            if not part or (words and not (yield from self._is_header(reading, header))):
                break
            broken = part != _SPELT.get(part, part) and not header.marked  # perhaps text
            if broken and not (yield from reading.follow(SPACE, part, SPACE, _BARE_PARTS)):
                break
            reading.take(len(space + part))
            part, header.marked = _SPELT.get(part, part), header.marked or part in _SPELT
            if part == _MESSAGE:
                header.whole = True
                return
            if part in _CHANNELS:
                header.channel = part
            elif part in (_RECIPIENT, _FUNCTIONS):
                yield from reading.space()
                name = (yield from reading.run(_NAME)).strip("\"'")
                recipient = name if part == _RECIPIENT else part + name
                header.recipient = "" if recipient in _PEOPLE else recipient
            elif part in _NEXT_PART and not (yield from reading.follow(SPACE, _PARTS)):
                word = yield from reading.run(_NAME)  # a tool as the author, or another channel
                if part == _CHANNEL and word.startswith(_FUNCTIONS):
                    header.recipient = word
            elif part == _CONSTRAIN:
                yield from reading.space()
                if not (yield from reading.accept("json")):  # a mark without brackets may follow
                    yield from reading.run(_FORMAT)
        yield from reading.drop_cut(_PARTS)
        if not header.marked or (yield from reading.is_last()):
            yield from reading.space()
            raise reading.unreadable()
        header.whole = True

    def _is_header(self, reading: Reading, header: _Header) -> Wait[bool]:
        """Return whether words are a header: markup follows, or a tool's arguments."""
        found = yield from reading.follow(SPACE, _HEADER_WORDS, _BODY_BEGINS)
        if not found or found[2] != "{":
            return bool(found)
        named = _TO_FUNCTION.fullmatch(found[1])
        header.marked = named is not None and reading.tools.meant(named[1]) in reading.tools
        return header.marked

    def _skips_junk(self, cursor: Cursor) -> Wait[bool]:
        """Skip signs and digits that mean nothing, before another part of the header.

        The model writes, for example, `<|channel|>commentary?`.
        """
        junk = (yield from cursor.follow(_JUNK, _PARTS)) or ("",)
        return bool(cursor.take(len(junk[0])).strip())

    def _call(self, reading: Reading, recipient: str) -> Wait[None]:
        name = recipient.removeprefix(_FUNCTIONS)
        if not reading.tools:
            raise Unreadable
        yield from reading.space()
        arguments = "{}"
        stopped = not (yield from reading.more()) and not reading.was_cut()
        empty = stopped and not reading.tools.lacks(name, ())
        reading.begin(name)
        if (yield from reading.at([_BEAM.parameter])):
            arguments = (yield from _BEAM.read_body(reading, Tag(name))).arguments
        elif not empty and not (yield from reading.at([*_ENDS, _START])):
            arguments = yield from read_arguments(reading, (*_ENDS, *_NEXT_PART))
        given = [arguments]
        while not (yield from reading.accept_after_space(*_ENDS)):
            if (yield from reading.follow(SPACE, "{")):  # another call of the same tool
                if len(given) == 1:
                    reading.call(Call(name, arguments))
                yield from reading.space()
                more = arguments_of((yield from read_value(reading, MODEL_JSON, _ENDS)))
                if more is None:
                    raise Unreadable
                if more not in given:
                    reading.call(Call(name, more))
                given.append(more)
            elif (yield from reading.follow(_SURELY_TEXT, ('"', "{", "}"))):
                raise Unreadable
            else:
                break
        if len(given) == 1:
            reading.call(Call(name, arguments))

    def _body(self, reading: Reading, header: _Header) -> Wait[None]:
        """Read the text of a message that is not a call."""
        answer = reading.answer
        reading.closing = _ENDS[0]
        _begin(answer, header, reasoning=header.channel == "analysis")
        if not answer.reasoning and (yield from self._unaddressed(reading)):
            return
        while marker := (
            yield from reading.until(_BODY_ENDS, lambda text: reading.write(text, _BODY_ENDS))
        ):
            if length := (yield from self._quoted(reading, marker)):
                answer.write(reading.take(length))
                continue
            reading.take(len(marker) if marker in _ENDS else 0)
            break
        answer.exact(reasoning=False)

    def _unaddressed(self, reading: Reading) -> Wait[bool]:
        """Read a message that is a call of an offered tool as JSON; returns whether it is one."""
        if not reading.tools or not (yield from reading.follow(SPACE, ("{", "["))):
            return False
        try:
            with reading.attempt():
                reading.offered = True
                yield from reading.space()
                yield from read_bare_calls(reading, (*_ENDS, *_NEXT_PART))
                yield from reading.accept_after_space(*_ENDS)
        except Unreadable:
            if not (reading.begun and reading.was_cut()):
                return False
            reading.rest()
        finally:
            reading.offered = False
        return True

    def _quoted(self, reading: Reading, marker: str) -> Wait[int]:
        """Return the length of the quoted text that a marker begins; 0 if the marker is real."""
        answer = reading.answer
        if (yield from is_quoted(reading, marker)):
            return len(marker)
        if marker in _ENDS:
            return 0
        if answer.markdown.fenced:
            return len(marker)
        start = reading.position
        with reading.ahead():
            reading.take(len(marker))
            if marker == _CHANNEL:
                # A real channel marker is followed by a channel's name and the rest of the header.
                for following in (_CHANNELS, _AFTER_CHANNEL):
                    yield from reading.space()
                    found = yield from reading.accept(*following)
                    if not found and (yield from reading.more()):
                        return len(marker)
            if not answer.quotes:
                return 0
            yield from reading.run(_QUOTED)
            if (yield from reading.peek()) == "{":
                try:
                    yield from read_value(reading)
                except Unreadable:
                    return 0
                yield from reading.run(_QUOTED)
            length = reading.position - start
            return length if (yield from reading.peek()) in ("`", "'", '"') else 0

    def _other(self, reading: Reading, header: _Header) -> Wait[None]:
        """Read text with another header, or without one, as content.

        A malformed call is content too, as written. Text that is not JSON, sent to a tool that the
        model knows from training, is a message.
        """
        answer = reading.answer
        if not header.recipient:
            yield from self._body(reading, _Header())
            return
        if header.whole and not header.recipient.startswith(_FUNCTIONS):
            yield from self._header(reading, _Header(marked=True))
            yield from self._body(reading, header)
            return
        answer.exact(reasoning=False)
        answer.write((yield from reading.space()))
        answer.write((yield from reading.accept(_START)))
        yield from reading.until(_NEXT, answer.write)
        answer.flush()


def _begin(answer: Answer, header: _Header, *, reasoning: bool = False) -> None:
    """Begin a text, which is exact unless it comes behind a call without a header."""
    begin = answer.edge if answer.called and not header.marked else answer.exact
    begin(reasoning=reasoning)


def _header_in(text: str) -> _Header:
    """Return the header that the prompt has begun, which counts as markup like a turn's start."""
    channel = next((name for name in _CHANNELS if f"{_CHANNEL}{name}" in text), "")
    recipient = re.search(r"to=([^\s<]+)", text)
    return _Header(channel, recipient[1] if recipient else "")
