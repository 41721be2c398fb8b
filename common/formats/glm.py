"""GLM and families like it, which write keys and values in separate tags."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.formats.answer import Call
from common.formats.cursor import SPACE, Cursor, Unreadable, Wait, markers_of
from common.formats.json_calls import at_plain_calls, read_json_calls
from common.formats.reading import CallSyntax, Reading, begins_line, no_content_yet
from common.formats.tag_spelling import openings
from common.formats.tagged_calls import AROUND_ARGUMENTS, NAME_TAG, CallTags, Tag
from common.formats.tool_schema import ToolSchemas
from common.formats.values import object_of

_NAME = re.compile(r"[^<>{}()\s\\]*")
_KEY = re.compile(r"[^<\n]*")
_UNOPENED_KEY = re.compile(r"[^<\s]+")
_WORD, _SOME_SPACE = re.compile(r"[\w.-]+"), re.compile(r"[ \t\r\n]+")
# Every quantifier that could try the same text again is possessive: answers may be long.
_PAIR = re.compile(
    r"""(?<![\w.-])([\w.-]++)="""
    r"""(?:("[^"]*"|'[^']*'),?|([^"'\s]\S*+(?:\s++(?![\w.-]++=)\S++)*+|))(?=\s|\Z)"""
)


def _before_key(text: str, tools: ToolSchemas) -> str:
    """Return the name in front of a declared key, if nothing divides them."""
    found = [
        name
        for name in tools.names
        if text.startswith(name) and text[len(name) :] in tools.properties(name)
    ]
    return found[0] if len(found) == 1 else text


@dataclass(frozen=True)
class KeyValueTags(CallTags):
    """`<tool_call>NAME`, then keys and values, each between tags."""

    key_close: str = ""
    value: str = ""
    after_name: str = ""
    kind: tuple[str, str] = ("", "")
    """Tags around the type of a value. The type is skipped: the tool's schema determines it."""

    def _read_calls(self, reading: Reading, _in_block: bool) -> Wait[None]:
        yield from reading.accept_all((*openings(self.call), ""), SPACE)
        pairs = yield from reading.follow(_NAME, _SOME_SPACE, _WORD, "=")
        element = yield from self._element(reading)
        if element.name:
            reading.call((yield from self._read_element(reading, element)))
        elif pairs and reading.tools.meant(pairs[0]) in reading.tools:
            yield from self._read_pairs(reading)
        elif (yield from at_plain_calls(reading)):
            yield from read_json_calls(reading, (self.call_close,))
        else:
            call = yield from self.read_inside(reading, self.call)
            if call.arguments == "{}" and call.name not in reading.tools:
                raise Unreadable  # a word between tags
            reading.call(call)
            return
        yield from reading.accept_after_space(self.call_close)

    def _read_pairs(self, reading: Reading) -> Wait[None]:
        """Read `NAME KEY=VALUE KEY=VALUE`, which mlx-lm reads as well; quotes are optional."""
        name = reading.tools.meant((yield from reading.run(_NAME)))
        chunks: list[str] = []
        yield from reading.inside(markers_of(self.call_close), chunks.append)
        text = "".join(chunks)
        if _PAIR.sub("", text).strip():
            raise Unreadable
        arguments = []
        for key, quoted, bare in _PAIR.findall(text):
            value = quoted[1:-1] or bare.removesuffix(",")
            arguments.append((key, reading.tools.typed(name, key, value, self.undeclared)))
        reading.call(Call(name, object_of(arguments)))

    def _gap(self, cursor: Cursor) -> Wait[None]:
        """Read space, and line breaks that the model wrote as `\\n`, which vLLM reads as well."""
        yield from cursor.space()
        while (yield from cursor.accept("\\n", *AROUND_ARGUMENTS)):
            yield from cursor.space()
        yield from cursor.drop_cut((self.call_close, "\\n"))

    def _read_call_header(self, reading: Reading, _begun: str) -> Wait[Tag]:
        yield from reading.space()
        with reading.ahead():
            name = yield from reading.run(_NAME)
            if (yield from reading.at([self.key_close])):
                name = _before_key(name, reading.tools)
        reading.take(len(name))
        end = reading.position
        yield from self._gap(reading)
        yield from reading.accept(self.after_name)
        yield from self._gap(reading)
        follow = [self.parameter, self.call_close, "{", self.call + name]
        if reading.tools.meant(name) in reading.tools:
            follow += ["<", "```"]
            # The end of an argument that the call does not have, or of the name.
            yield from reading.accept(*self._ends, "</tool_name>", "</name>")
            yield from self._gap(reading)
            ended = not (yield from reading.more())
            if ended and reading.stopped and reading.position > end:
                return Tag(name)  # the text behind it shows that the name is complete
        if not (yield from reading.at(follow)):
            with reading.ahead():
                if not (yield from self._opens_parameter(reading)):
                    raise reading.unreadable()
        return Tag(name)

    def _opens_parameter(self, cursor: Cursor) -> Wait[str]:
        """Read a key's tag, perhaps repeated; without it, the closing tag of the key must follow.

        A call's tag in its place, which has that closing tag too, is read as a key's.
        """
        opened = ""
        while found := (yield from cursor.accept(*self._parameters)):
            opened = found
        if opened:
            return opened
        if not (yield from cursor.follow((self.call, ""), _UNOPENED_KEY, self.key_close)):
            return ""
        yield from cursor.accept(self.call)
        return self.parameter

    def _read_parameter_header(self, cursor: Reading, _begun: str) -> Wait[Tag]:
        yield from cursor.space()
        words: list[str] = []
        closings = openings(self.key_close)
        yield from cursor.until(markers_of("<", "\n", *closings), words.append)
        key, closed = "".join(words).strip(" \t\r\n\"'`"), False
        yield from cursor.space()
        while (yield from cursor.accept(*closings)):
            closed = True
        yield from cursor.space()
        if self.kind[0] and (yield from cursor.accept(self.kind[0])):
            yield from cursor.run(_KEY)
            yield from cursor.expect(self.kind[1])
        yield from self._gap(cursor)
        if (yield from cursor.follow(("=", ":"), SPACE, self.value)):
            yield from cursor.accept_all(("=", ":"), SPACE)
        opened = yield from cursor.accept(*openings(self.value))
        if not opened:
            ends = (self.parameter, self.key_close, self.value, self.value[1:], self.kind[0])
            yield from cursor.drop_cut(ends)
        if not key or not (closed or opened):
            raise cursor.unreadable()
        return Tag(key)

    @property
    def unopened(self) -> tuple[CallSyntax, ...]:
        """Calls without their first tag: names at the beginning of the answer, or in elements."""

        def read(reading: Reading) -> Wait[None]:
            reading.call((yield from self.read_inside(reading, "")))

        def read_elements(reading: Reading) -> Wait[None]:
            reading.opener = ""
            yield from self.read(reading)

        return (
            CallSyntax((), read, begins=no_content_yet, by_name=True),
            CallSyntax((NAME_TAG,), read_elements, begins=begins_line, broken=True),
        )
