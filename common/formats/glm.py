"""GLM 4.5, 4.7 and 5, and Longcat, which is similar: keys and values in separate tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from common.formats.cursor import Cursor, Wait
from common.formats.json_calls import read_json_calls
from common.formats.reading import CallSyntax, Reading, Tags, no_content_yet
from common.formats.tagged_calls import CallTags
from common.formats.tagged_text import TaggedText

_NAME = re.compile(r"[^<>{}()\s\\]*")
_KEY = re.compile(r"[^<\n]*")


@dataclass(frozen=True)
class KeyValueTags(CallTags):
    """`<tool_call>NAME`, then keys and values, each between tags."""

    key_close: str = ""
    value: str = ""

    def read(self, reading: Reading) -> Wait[None]:
        cursor = reading.cursor
        with cursor.ahead():
            yield from cursor.accept(self.call)
            space = len((yield from cursor.space()))
            is_json = (yield from cursor.peek()) in ("{", "[")
        if is_json:
            cursor.take(len(self.call) + space)
            yield from read_json_calls(reading, (self.call_close,))
            yield from cursor.space()
            yield from cursor.accept(self.call_close)
        else:
            yield from CallTags.read(self, reading)

    def _gap(self, cursor: Cursor) -> Wait[None]:
        """Read space, and line breaks that the model wrote as `\\n`, which vLLM reads as well."""
        yield from cursor.space()
        while (yield from cursor.accept("\\n")):
            yield from cursor.space()

    def _read_call_header(self, cursor: Cursor) -> Wait[tuple[str, bool, str]]:
        yield from cursor.space()
        name = yield from cursor.run(_NAME)
        yield from self._gap(cursor)
        follow = [self.parameter, self.call_close, "{", self.call + name]
        if not (yield from cursor.at(follow)):
            with cursor.ahead():
                if not (yield from self._opens_parameter(cursor)):
                    raise cursor.unreadable()
        return name, False, ""

    def _opens_parameter(self, cursor: Cursor) -> Wait[bool]:
        """Whether a key comes next; if its opening tag is missing, its closing tag must follow."""
        if (yield from cursor.accept(self.parameter)):
            return True
        with cursor.ahead():
            key = yield from cursor.run(_KEY)
            return bool(key.strip()) and bool((yield from cursor.at([self.key_close])))

    def _read_parameter_header(self, cursor: Cursor) -> Wait[tuple[Mapping[str, str], bool]]:
        yield from cursor.space()
        key = (yield from cursor.run(_KEY)).strip()
        yield from cursor.space()
        closed = yield from cursor.accept(self.key_close)
        start = cursor.position
        with cursor.ahead():
            yield from self._gap(cursor)
            space = cursor.position - start
            opened = yield from cursor.at([self.value])
        cursor.take(space + len(opened))
        yield from cursor.drop_cut((self.key_close, self.value))
        if not key or not (closed or opened):
            raise cursor.unreadable()
        return {"name": key}, False


def _text(prefix: str, think: str) -> TaggedText:
    tags = KeyValueTags(
        call=f"<{prefix}tool_call>",
        call_close=f"</{prefix}tool_call>",
        parameter=f"<{prefix}arg_key>",
        parameter_close=f"</{prefix}arg_value>",
        key_close=f"</{prefix}arg_key>",
        value=f"<{prefix}arg_value>",
        undeclared="guess",
    )

    def read_without_opening(reading: Reading) -> Wait[None]:
        reading.call((yield from tags.read_inside(reading)))

    return TaggedText(
        tags=(Tags(f"<{think}>", f"</{think}>"),),
        calls=(
            CallSyntax(tags.openers, tags.read, tags.closers),
            CallSyntax((), read_without_opening, begins=no_content_yet, by_name=True),
        ),
        starts_line=True,
    )


GLM_TEXT = _text("", "think")
LONGCAT_TEXT = _text("longcat_", "longcat_think")
