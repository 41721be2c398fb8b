"""Blocks that a function parses once they are complete, for families without a grammar here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.formats.answer import Call
from common.formats.cursor import Markers, Unreadable, Wait
from common.formats.json_calls import arguments_of
from common.formats.reading import CallSyntax, Reading, Tags
from common.formats.tagged_text import TaggedText
from common.formats.values import json_string


@dataclass(frozen=True)
class Block:
    """The markers of a block, and the function that parses its content."""

    opener: str
    closer: str
    parse: Callable[[str, Sequence[Mapping[str, Any]]], Any]

    def grammar(self, tags: tuple[Tags, ...]) -> TaggedText:
        closers = (self.closer,) if self.closer else ()
        return TaggedText(tags=tags, calls=(CallSyntax((self.opener,), self.read, closers),))

    def read(self, reading: Reading) -> Wait[None]:
        """Parse the calls of a complete block; without a closing marker it ends with the text."""
        cursor = reading.cursor
        cursor.take(len(self.opener))
        chunks: list[str] = []
        marker = yield from cursor.until(Markers([self.closer]), chunks.append)
        if marker != self.closer or (not marker and reading.was_cut()):
            raise cursor.unreadable()
        cursor.take(len(marker))
        try:
            found = self.parse("".join(chunks), reading.tools.offered)
            calls = [_call(entry) for entry in (found if isinstance(found, list) else [found])]
        except Exception as error:  # any exception of a foreign parser means that the block is text
            raise Unreadable from error
        for call in calls:
            reading.call(call)


def _call(entry: Any) -> Call:
    arguments = entry.get("arguments")
    text = arguments_of(
        json_string(arguments)
        if isinstance(arguments, str)
        else json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    )
    if text is None or not isinstance(entry["name"], str):
        raise Unreadable
    return Call(entry["name"], text, entry.get("id") or "")
