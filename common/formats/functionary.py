"""Functionary 3.2 and xLAM: calls to recipients, and lists of JSON that may be in a code block."""

from __future__ import annotations

import re

from common.formats import mistral
from common.formats.answer import Call
from common.formats.cursor import Wait
from common.formats.json_calls import bare_block, read_arguments, read_bare_calls
from common.formats.qwen import MARKED_CALLS
from common.formats.reading import CallSyntax, Reading, begins_line, no_content_yet
from common.formats.tagged_text import TaggedText

_TO, _ALL = ">>>", "all\n"
_NAME = re.compile(r"[\w.:/-]*")


def _read_addressed(reading: Reading) -> Wait[None]:
    """Read the name of a tool on a line of its own, and its arguments."""
    cursor = reading.cursor
    yield from cursor.accept(_TO)
    name = yield from cursor.run(_NAME)
    yield from cursor.expect("\n", "\r\n")
    if not name or (yield from cursor.peek()) != "{":
        raise cursor.unreadable()
    reading.begin(name)
    reading.call(Call(name, (yield from read_arguments(reading, (_TO,)))))


class Addressed(TaggedText):
    """If the prompt ends with `>>>`, the answer begins with a recipient; `all` is the user."""

    def read(self, reading: Reading) -> Wait[None]:
        if reading.prompt_tail.endswith(_TO):
            yield from reading.cursor.accept(_ALL)
            yield from reading.cursor.drop_cut((_ALL,))
        yield from TaggedText.read(self, reading)


CALLS = (
    CallSyntax((_TO,), _read_addressed),
    CallSyntax((), _read_addressed, begins=no_content_yet, by_name=True),
)


XLAM_CALLS = (
    MARKED_CALLS,
    mistral.CALLS[0],
    bare_block("```", "```"),
    CallSyntax(("[", "{"), read_bare_calls, begins=begins_line),
)
