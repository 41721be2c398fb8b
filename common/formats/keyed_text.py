"""Calls whose arguments are keys and values without tags: lines, YAML, or attributes of one tag.

The text that ends a value may also be a part of it. It ends the value only if the next key or the
end of the call follows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import unescape

from common.formats.cursor import Cursor, Wait, markers_of
from common.formats.reading import Reading
from common.formats.tagged_calls import CallTags, Tag
from common.formats.value_sender import ValueSender
from common.formats.values import Pairs

_NAME, _KEY = re.compile(r"[\w.:/-]+"), re.compile(r"[\w.$-]+")
_BLANKS, _QUOTES = re.compile(r"[ \t]*"), re.compile(r"[\s\"'`]*")
_MARKUP = ("<", "[")


@dataclass(frozen=True)
class KeyedText(CallTags):
    """The texts around keys and values.

    parameter: the text before a key; there may be none.
    parameter_close: the text after a value, a line break or a quotation mark.
    before_name, after_name: the texts around the tool's name, without quotes.
    sign: the text between a key and its value.
    escaped: whether values have the escapes of HTML.
    """

    before_name: str = ""
    after_name: str = ""
    sign: str = "="
    escaped: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return tuple(text for text in (self.block, self.call) if text.startswith(_MARKUP))

    @property
    def _on_lines(self) -> bool:
        return self.parameter_close == "\n"

    def _read_call_header(self, reading: Reading, _begun: str) -> Wait[Tag]:
        yield from reading.run(_QUOTES)
        if self.before_name:
            yield from reading.expect(self.before_name)
        yield from reading.run(_QUOTES)
        name = yield from reading.run(_NAME)
        yield from reading.run(_QUOTES)
        yield from reading.accept(self.after_name)
        return Tag(name)

    def _read_parameter_tag(
        self, reading: Reading, _name: str, _given: Pairs, _close: str
    ) -> Wait[Tag | None]:
        key = yield from self._read_key(reading)
        return Tag(key) if key else None

    def _next_key(self, reading: Reading) -> Wait[str | None]:
        with reading.ahead():
            return (yield from self._read_key(reading)) or None

    def _read_key(self, cursor: Cursor) -> Wait[str]:
        """Read a key up to its value; returns '' and reads nothing if none comes next."""
        around = (*"\"'", "")
        parts = ((self.parameter, ""), _BLANKS, around, _KEY, around, _BLANKS, self.sign)
        found = yield from cursor.accept_all(*parts)
        if self._on_lines:
            yield from cursor.run(_BLANKS)
        return found[3] if found else ""

    def _read_value(self, reading: Reading, value: ValueSender) -> Wait[str]:
        value.stop()
        chunks: list[str] = []
        ends = markers_of(self.parameter_close, *(self._call_ends if self._on_lines else ()))
        while marker := (yield from reading.until(ends, chunks.append)):
            if (yield from self._ends_text(reading, marker, value)):
                reading.take(len(marker) if marker == self.parameter_close else 0)
                break
            chunks.append(reading.take(len(marker)))
        if not marker and not (self._on_lines and reading.stopped):
            raise reading.unreadable()
        text = "".join(chunks)
        text = text.strip(" \t\r") if self._on_lines else text
        return value.typed(unescape(text) if self.escaped else text)

    def _ends_text(self, reading: Reading, marker: str, value: ValueSender) -> Wait[bool]:
        with reading.ahead():
            reading.take(len(marker))
            if marker != self.parameter_close:
                yield from reading.run(_BLANKS)
                return (yield from reading.peek()) in ("", "\n", "\r")
            yield from reading.space()
            if not (yield from reading.more()):
                return not reading.was_cut()
            ends = filter(None, (*self._call_ends, self.block_close, *self._calls))
            if (yield from reading.at(ends)):
                return True
            key = yield from self._next_key(reading)
            return key is not None and key not in value.given and key in (value.declared or [key])
