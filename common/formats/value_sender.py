"""Sends the value of an argument while the model writes it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from common.formats.json_text import escaped, json_string
from common.formats.reading import Reading
from common.formats.tool_schema import Undeclared
from common.formats.values import Pairs, as_json

Lines = Literal["kept", "dropped", "paired"]
_BEHIND: Mapping[Lines, re.Pattern[str]] = {
    "kept": re.compile(r"(?:\r?\n)?\r?\Z"),
    "dropped": re.compile(r"(?:\r?\n)?\r?\Z"),
    "paired": re.compile(r"(?:\r?\n){0,2}\r?\Z"),
}
"""The line breaks at the end of a value that may turn out not to belong to it."""
FIRST_BREAK, LAST_BREAK = re.compile(r"\A\r?\n"), re.compile(r"\r?\n\Z")
_TYPED_BY = 64  # a longer value whose type is still open is sent only when it is complete


class QuotedMarkup:
    """Counts the elements of quoted markup that are open inside a value, by their closing tags."""

    def __init__(self) -> None:
        self._tags: list[str] = []
        self._counts: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._tags)

    def open(self, closing: str) -> None:
        self._tags.append(closing)
        self._counts[closing] += 1

    def close(self, closing: str) -> bool:
        """Close the latest element with this tag, and those inside it; returns whether any is."""
        if not self._counts[closing]:
            return False
        latest = ""
        while latest != closing:
            latest = self._tags.pop()
            self._counts[latest] -= 1
        return True


class ValueSender:
    """Sends a value while it is read, as soon as it can only be a string.

    tool, key: the argument whose value it is.
    given: the arguments before it.
    is_text: whether the argument's tag says that it is a string; None if it does not say.
    """

    def __init__(
        self, reading: Reading, tool: str, key: str, given: Pairs, is_text: bool | None = None
    ) -> None:
        self._reading, self._is_text = reading, is_text
        self.tool, self.key = tool, key
        self.undeclared: Undeclared = "text"
        self.lines: Lines = "kept"
        self._chunks: list[str] = []
        self._text = ""  # text that was read and not sent yet
        self._streams_text: bool | None = None
        self.sent = 0
        self.quoted = QuotedMarkup()
        self.quotes = False  # whether a quoted call has begun
        self.ends: tuple[str, ...] = ()  # closing tags of this value
        self.given = {key, *(earlier for earlier, _ in given)}
        self.declared = reading.tools.properties(tool)
        reading.send((", " if given else "{") + json_string(key) + ": ")

    @property
    def text(self) -> str:
        """The text that was read."""
        return "".join(self._chunks)

    def add(self, text: str) -> None:
        self._chunks.append(text)
        if self._streams_text is False:
            return
        self._text += text
        if self._streams_text is None:
            self._decide()
        if self._streams_text:
            end = len(self._text)
            if behind := _BEHIND[self.lines].search(self._text):
                end = behind.start()
            self._put(escaped(self._text[:end]))
            self._text = self._text[end:]

    def stop(self) -> None:
        """Stop sending text, because the following text may not belong to the value."""
        self._streams_text = False

    def restart(self) -> None:
        """Stop sending text, and forget what was read, because the value is read again."""
        self.stop()
        self._chunks.clear()

    def whole(self, value: str) -> None:
        """End the value, with its complete JSON."""
        self._put(value[self.sent :])

    def typed(self, text: str) -> str:
        """Return the value as JSON."""
        tools, tool, key = self._reading.tools, self.tool, self.key
        if self.lines == "dropped" or (self.lines == "paired" and FIRST_BREAK.match(text)):
            text = LAST_BREAK.sub("", FIRST_BREAK.sub("", text))
        if self._is_text:
            return tools.retyped(tool, key, text)
        if self._is_text is None:
            return tools.typed(tool, key, text, self.undeclared)
        return as_json(text) or tools.typed(tool, key, text, "guess")

    def _can_only_be_text(self, begun: str) -> bool:
        tools = self._reading.tools
        if self._is_text is None:
            return tools.is_text(self.tool, self.key, begun, self.undeclared)
        return self._is_text and not tools.excludes_text(self.tool, self.key)

    def _decide(self) -> None:
        if self.lines != "kept" and self._text == "\r":
            return
        if self._can_only_be_text(self._text):
            self._streams_text = True
            if self.lines != "kept":
                self._text = FIRST_BREAK.sub("", self._text)
            self._put('"')
        elif len(self._text) > _TYPED_BY:
            self._streams_text = False

    def _put(self, text: str) -> None:
        self._reading.send(text)
        self.sent += len(text)
