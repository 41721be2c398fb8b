"""Solar Open: messages of one kind each, for thoughts, text and calls."""

from __future__ import annotations

from common.formats.answer import Call
from common.formats.cursor import Markers, Wait
from common.formats.json_calls import read_arguments
from common.formats.reading import CallSyntax, Reading, Tags
from common.formats.sections import Section
from common.formats.tagged_text import TaggedText

_NAME, _ARGUMENTS, _CALL_END = "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"


def _read_call(reading: Reading) -> Wait[Call]:
    """Read the call's id, its name, and JSON. Only a long id is used, because a number is not
    unique in a conversation.
    """
    cursor = reading.cursor
    words: list[str] = []
    for mark in (_NAME, _ARGUMENTS):
        yield from cursor.until(Markers([mark, _CALL_END, "{", "\n\n"]), words.append)
        yield from cursor.expect(mark)
        words.append(mark)
    identity, _, name = "".join(words).removesuffix(_ARGUMENTS).partition(_NAME)
    identity, name = identity.strip(), name.strip()
    if not name:
        raise cursor.unreadable()
    if identity.isdecimal():
        identity = ""
    reading.begin(name, identity)
    if (yield from cursor.at([_CALL_END])):
        return Call(name, "{}", identity)
    return Call(name, (yield from read_arguments(reading, (_CALL_END,))), identity)


_SECTION = Section("<|tool_calls|>", "<|calls|>", "<|tool_call:begin|>", _CALL_END, _read_call)
_NEXT = ("<|begin|>assistant", "<|content|>", "<|flush|>")
TEXT = TaggedText(
    tags=(Tags("<|think|>", "<|end|>", anywhere=True),),
    calls=(CallSyntax(_SECTION.openers, _SECTION.read, _SECTION.closers),),
    answer="<|content|>",
    silent=_NEXT,
)
