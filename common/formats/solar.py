"""Solar Open and PLaMo 3: sections of calls whose parts have markers of their own."""

from __future__ import annotations

from common.formats.answer import Call
from common.formats.cursor import Markers, Wait
from common.formats.json_calls import read_arguments
from common.formats.reading import Reading
from common.formats.sections import Section

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
CALLS = (_SECTION.syntax,)


def plamo(word: str) -> tuple[str, str]:
    return f"<|plamo:begin_{word}:plamo|>", f"<|plamo:end_{word}:plamo|>"


_PLAMO_NAME, _PLAMO_ARGUMENTS = plamo("tool_name"), plamo("tool_arguments")
_PLAMO_CALLS, _PLAMO_CALL = plamo("tool_requests"), plamo("tool_request")
_JSON, PLAMO_MESSAGE = "<|plamo:constrain|>json", "<|plamo:msg|>"


def _read_plamo(reading: Reading) -> Wait[Call]:
    """Read a name and JSON, each between its own markers."""
    cursor = reading.cursor
    words: list[str] = []
    yield from cursor.space()
    yield from cursor.expect(_PLAMO_NAME[0])
    yield from cursor.inside(Markers([_PLAMO_NAME[1], "\n\n"]), words.append)
    yield from cursor.expect(_PLAMO_NAME[1])
    name = "".join(words).strip()
    if not name:
        raise cursor.unreadable()
    yield from cursor.space()
    yield from cursor.expect(_PLAMO_ARGUMENTS[0])
    yield from cursor.accept(_JSON)
    yield from cursor.accept(PLAMO_MESSAGE)
    reading.begin(name)
    ends = (_PLAMO_ARGUMENTS[1], _PLAMO_CALL[1])
    if (yield from cursor.at(ends)):
        arguments = "{}"
    else:
        arguments = yield from read_arguments(reading, ends)
    yield from cursor.accept_after_space(_PLAMO_ARGUMENTS[1])
    return Call(name, arguments)


PLAMO_CALLS = (Section(*_PLAMO_CALLS, *_PLAMO_CALL, _read_plamo).syntax,)
