"""Calls between markers, with names outside the JSON of their arguments, perhaps in a section."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from common.formats.answer import Call
from common.formats.cursor import SPACE, Cut, Unreadable, Wait, markers_of
from common.formats.json_calls import at_plain_calls, read_arguments, read_json_calls
from common.formats.reading import CallSyntax, Reading
from common.formats.tag_spelling import closings, openings
from common.formats.tagged_calls import CallTags
from common.formats.tool_schema import ToolSchemas
from common.formats.values import parts

_ARGUMENTS_BEGIN = ("{", "}", '"', "```")
_ID_ALONE = re.compile(r"\d+|call_\w+|chatcmpl-tool-\w+")
"""In place of a name: a number, or another server's id, which models copy from earlier turns."""
_TAG = re.compile(r"<?[|｜](?:[^<>|｜]*[|｜])?>?")
_NAME = re.compile(r"[\w.:/-]+")
_CALL_ID = "[CALL_ID]"  # an id comes behind it
_QUOTES = "\"'`"
_NO_NAMES = ("json", "null", "[]")
_AROUND_ID = re.compile(r"\A(?:functions?[_.-]?|\d+)|[_-]\d+\Z")
"""How a client may have changed an id such as `functions.NAME:0`, which models copy, and what comes
before a name if the marker between them is missing.
"""
_NAMED = re.compile(r"(?:functions\.)?([^\s<>{}`]+?)(:\d+)?")


def _nothing(_text: str) -> None:
    pass


@cache
def _closings(markers: tuple[str, ...], openers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f for marker in markers for f in closings(marker) if f not in openers)


def _named(text: str, tools: ToolSchemas) -> tuple[str, str]:
    """Return the name and the id in the text before a call's arguments; '' for a missing name.

    Families write `NAME`, `function<sep>NAME`, `ID<name>NAME`, `NAME<id>ID`, or `functions.NAME:0`,
    which is also the id. A number alone is no id, because it is not unique in a conversation.
    """
    spaced = _TAG.sub(" ", text.replace(_CALL_ID, " "))
    words = [
        word.strip(_QUOTES).removeprefix("to=") for word in spaced.split() if word not in _NO_NAMES
    ]
    behind = _CALL_ID in text or (words[0:1] and words[0] in tools and words[-1] not in tools)
    if len(words) == 2 and behind:
        words.reverse()
    found = _NAMED.fullmatch(words[-1]) if len(words) in (1, 2) else None
    if not found:
        return "", ""
    name, bare = found[1], _AROUND_ID.sub("", found[1].partition(":")[0])
    before = "" if len(words) == 1 or words[0] == "function" or words[0].isdecimal() else words[0]
    return bare if bare in tools and name not in tools else name, words[-1] if found[2] else before


@dataclass(frozen=True, slots=True)
class Section:
    """The markers around all calls, and around each call, in every spelling.

    openers, closers, calls, call_closes: each may be empty.
    unmarked: whether a call's marker may be missing.
    tags: the tags of the calls, if they have any.
    between: the texts between a name and the arguments, such as ReAct's `Action Input:`.
    """

    openers: tuple[str, ...]
    closers: tuple[str, ...]
    calls: tuple[str, ...]
    call_closes: tuple[str, ...]
    unmarked: bool = False
    tags: CallTags | None = None
    between: tuple[str, ...] = ()

    @property
    def syntax(self) -> CallSyntax:
        openers = (*self.openers, *self.calls) or ("",)
        return CallSyntax(openers, self.read, (*self.closers, *self.call_closes))

    def spelt(self, *ways: Mapping[str, str]) -> Section:
        """Return the section with markers that are also spelt in these ways."""

        def spell(markers: tuple[str, ...]) -> tuple[str, ...]:
            tables = [str.maketrans({**way}) for way in ({}, *ways)]
            return tuple(dict.fromkeys(m.translate(table) for table in tables for m in markers))

        return replace(
            self,
            openers=spell(self.openers),
            closers=spell(self.closers),
            calls=spell(self.calls),
            call_closes=spell(self.call_closes),
        )

    def read(self, reading: Reading) -> Wait[None]:
        """Read a section, or calls whose section marker is missing; an empty section is dropped."""
        opened = (form for marker in self.openers for form in openings(marker))
        in_section = bool((yield from reading.accept(*opened)))
        count = 0
        while (yield from self._reaches_call(reading, in_section, count)):
            while (yield from reading.accept(*self.calls)):
                yield from reading.space()  # a marker that was written twice
            yield from reading.space()
            if not self.call_closes and not (yield from reading.more()):
                return
            if (yield from at_plain_calls(reading)):
                yield from read_json_calls(reading, self._ends())
                yield from self._close_call(reading)
            else:
                yield from self.read_named(reading)
            count += 1
        if (yield from reading.accept_all(SPACE, self._spelt(self.closers))):
            reading.settle()
        elif not count:
            raise reading.unreadable()

    def _reaches_call(self, reading: Reading, in_section: bool, count: int) -> Wait[bool]:
        """Read what comes before the next call; returns whether one comes next.

        Templates write no text there, and other parsers of these families do not show it.

        count: the number of calls that were read.
        """
        with reading.ahead() as keep:
            yield from reading.space()
            following = yield from reading.at([*self.calls, *self._spelt(self.closers)])
            found = following in self.calls or not (following or self.calls or count)
            if not following and self.between and count:
                found = bool((yield from reading.follow(_NAME, (*self.between, _CALL_ID, "{"))))
            elif not following and in_section:
                found = found or (yield from at_plain_calls(reading))
            if found:
                keep()
                return True
        if following or not (in_section and self.calls) or (yield from reading.is_last()):
            return False
        brace = "{" if self.unmarked else ""
        with reading.ahead() as keep:
            ends = markers_of(*self.calls, *self.closers, *self.call_closes, brace)
            marker = yield from reading.until(ends, _nothing)
            if marker in self.calls:
                keep()
        if not marker and brace and reading.was_cut():
            raise Cut
        return bool(marker) and (marker in self.calls or marker == brace)

    def read_named(self, reading: Reading) -> Wait[None]:
        """Read a call from its name on."""
        call = yield from self._read_call(reading)
        yield from self._close_call(reading)
        reading.call(call)

    def _read_call(self, reading: Reading) -> Wait[Call]:
        """Read the text with the name, and the arguments, from behind the call's marker."""
        if self.tags:
            yield from reading.until(markers_of(self.tags.call, *self.call_closes), _nothing)
            return (yield from self.tags.read_call(reading))
        name, identity, marked = yield from self._read_name(reading)
        begins: tuple[str, ...] = ("{",) if self.between else _ARGUMENTS_BEGIN
        if marked:
            begins = ("[", *_ARGUMENTS_BEGIN)
        begun = yield from reading.at([*begins, *self.call_closes, *self.closers])
        if name and (begun or marked):
            reading.begin(name, identity)
        alone = marked or (self.between and reading.tools.takes_nothing(name))
        if not name or not (begun or (alone and (yield from self._ends_here(reading)))):
            raise reading.unreadable()
        given = begun in begins
        arguments = (yield from read_arguments(reading, self._ends())) if given else "{}"
        if name not in reading.tools and _ID_ALONE.fullmatch(name):
            # The arguments may identify the tool.
            fitting = reading.tools.accepting(key for key, _ in parts(arguments))
            if len(fitting) != 1 and name.isdecimal():
                raise Unreadable
            name = fitting[0] if len(fitting) == 1 else name
        return Call(name, arguments, identity)

    def _read_name(self, reading: Reading) -> Wait[tuple[str, str, bool]]:
        """Return a call's name and id, and whether the text between name and arguments came."""
        words: list[str] = []
        ends = (*self.call_closes, *self.closers, *_ARGUMENTS_BEGIN, "\n\n", *self.between)
        calls = self.calls if self.between else ()  # other families' names may contain the marker
        markers = markers_of(*ends, *calls)
        while True:
            yield from reading.until(markers, words.append)
            quoted = yield from reading.follow('"', _NAME, '"')
            if not quoted or (words and reading.tools.meant(quoted[1]) not in reading.tools):
                break
            reading.take(len(quoted[1]) + 2)
            words.append(quoted[1])
        written = "".join(words).replace("`", "").strip().strip(_QUOTES)
        text = written.rstrip(":") if self.between else written
        name, identity = _named(text, reading.tools)
        single = len(text.split()) == 1 or _CALL_ID in text
        if self.between and not (single and _NAME.fullmatch(name)):
            name = ""
        marked = text != written  # a colon is a mark of arguments too
        while (yield from reading.accept(*self.between, *(f"{name}{b}" for b in self.between))):
            marked = True
            yield from reading.space()
        yield from reading.space()
        return name, identity, marked

    def _ends_here(self, reading: Reading) -> Wait[bool]:
        """Return whether the next call or the end of the answer comes next."""
        if (yield from reading.at(self.calls)):
            return True
        return not (yield from reading.more()) and not reading.was_cut()

    def _spelt(self, closers: tuple[str, ...]) -> tuple[str, ...]:
        """Return closing markers in every spelling that is no opening one."""
        return _closings(closers, (*self.openers, *self.calls))

    def _ends(self) -> tuple[str, ...]:
        return (
            *self._spelt(self.call_closes),
            *self.calls,
            *self._spelt(self.closers),
        )

    def _close_call(self, reading: Reading) -> Wait[None]:
        """Read a call's closing marker, which may be missing if the next text implies it."""
        yield from reading.accept_after_space("```")
        closes, closed = self._spelt(self.call_closes), not self.call_closes
        while True:
            yield from reading.drop_cut(self._ends())
            space, found = yield from reading.after_space(self._ends())
            if (yield from reading.is_last()):
                return
            if not (found or closed):
                raise reading.unreadable()
            reading.take(space + (len(found) if found in closes else 0) if found else 0)
            if found in closes and not found.endswith(">"):  # the tag may repeat the name
                yield from reading.accept_all((":", "="), _NAME, ">")
            if found not in closes:
                return
            closed = True
