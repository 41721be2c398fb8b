"""Mistral: `[TOOL_CALLS]` before a JSON list, or before each name with its `[ARGS]`."""

from __future__ import annotations

import re

from common.formats.answer import Call
from common.formats.cursor import Wait
from common.formats.json_calls import read_arguments, read_bare_calls, read_json_calls
from common.formats.pythonic import at_named_call
from common.formats.reading import CallSyntax, Reading, begins_line, no_content_yet

_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_BROKEN = ("[TOOL_CALLS", "TOOL_CALLS]", "TOOL_CALLS", "[TOOL_CALL]")
_ARGUMENTS = (_ARGS, "[ARGS", "ARGS]", "[args]", "[ARGUMENTS]", "=")
"""The marker before the arguments, and what models write instead."""
_NAME = re.compile(r"[\w.:/-]*")


def _read(reading: Reading) -> Wait[None]:
    yield from reading.accept(_CALLS, *_BROKEN)
    yield from reading.accept(":")
    while True:
        yield from reading.space()
        if not (yield from reading.more()):
            return
        named = (yield from reading.at([_ARGS, _CALL_ID])) or not (yield from _in_brackets(reading))
        if not named:
            yield from read_json_calls(reading)
            return
        yield from _read_named(reading)
        with reading.ahead():
            yield from reading.space()
            named = bool((yield from reading.run(_NAME)))
            another = named and bool((yield from reading.at([_ARGS, _CALL_ID, "{"])))
        if not another:
            return


def _in_brackets(reading: Reading) -> Wait[bool]:
    """Return whether JSON comes next, or a call with its arguments in brackets."""
    if (yield from reading.peek()) in ("[", "{", "`"):
        return True
    return (yield from at_named_call(reading)) == "("


def _read_named(reading: Reading) -> Wait[None]:
    """Read `NAME[CALL_ID]ID[ARGS]{…}`; the id, and in some versions `[ARGS]`, may be missing.

    Models also write the name and `[ARGS]` twice, quotes around the name, or a colon behind it.

    A name alone is a call of an offered tool that has no arguments.
    """
    quote = yield from reading.accept('"')
    written = yield from reading.run(_NAME)
    yield from reading.accept(quote)
    name = written.rstrip(":")
    if not name:
        raise reading.unreadable()
    yield from reading.space()
    identity = ""
    if (yield from reading.accept(_CALL_ID)):
        identity = (yield from reading.run(_NAME)).strip()
    marked = written != name
    while (yield from reading.accept(*_ARGUMENTS, f"{name}{_ARGS}")):
        marked = True
        yield from reading.space()
    ended = not (yield from reading.more()) and not reading.was_cut()
    none = ended or bool((yield from reading.at([_CALLS])))
    if (yield from reading.peek()) != "{" and not (
        marked or (none and reading.tools.takes_nothing(name))
    ):
        raise reading.unreadable()
    reading.begin(name, identity)
    arguments = "{}" if none else (yield from read_arguments(reading, (_CALLS,)))
    reading.call(Call(name, arguments, identity))


def _read_without_opening(reading: Reading) -> Wait[None]:
    """Read a call whose first token is missing; `[ARGS]` still identifies it."""
    if (yield from reading.peek()) in ("[", "{"):
        yield from read_bare_calls(reading)
        return
    with reading.ahead():
        yield from reading.run(_NAME)
        if not (yield from reading.at([_ARGS, _CALL_ID])):
            raise reading.unreadable()
    yield from _read_named(reading)


CALLS = (
    CallSyntax((_CALLS,), _read),
    CallSyntax(_BROKEN, _read, begins=begins_line, broken=True),
    CallSyntax(("[", "{"), _read_without_opening, begins=no_content_yet, by_name=True),
)
