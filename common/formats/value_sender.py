"""Sends the value of an argument while the model writes it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from common.formats.json_text import Send, escaped

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
    """Sends a value while it is read, as soon as it can only be a string."""

    def __init__(self, send: Send, is_text: Callable[[str], bool], lines: Lines = "kept") -> None:
        self._send = send
        self._is_text = is_text
        self.lines = lines
        self._text = ""  # text that was read and not sent yet
        self._streams_text: bool | None = None
        self.sent = 0
        self.quoted = QuotedMarkup()
        self.quotes = False  # whether a quoted call has begun
        self.ends: tuple[str, ...] = ()  # closing tags of this value
        self.given: Collection[str] = ()  # keys of the call so far, this value's included
        self.declared: Collection[str] = ()  # keys that the tool declares

    def add(self, text: str) -> None:
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

    def whole(self, value: str) -> None:
        """End the value, with its complete JSON."""
        self._put(value[self.sent :])

    def _decide(self) -> None:
        if self.lines != "kept" and self._text == "\r":
            return
        if self._is_text(self._text):
            self._streams_text = True
            if self.lines != "kept":
                self._text = FIRST_BREAK.sub("", self._text)
            self._put('"')
        elif len(self._text) > _TYPED_BY:
            self._streams_text = False

    def _put(self, text: str) -> None:
        self._send(text)
        self.sent += len(text)
