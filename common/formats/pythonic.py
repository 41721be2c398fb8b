"""Calls written as Python calls, in a list or alone: `[get_weather(city='Rome')]`."""

from __future__ import annotations

import re

from common.formats.answer import Call
from common.formats.cursor import Unreadable, Wait
from common.formats.json_calls import drop_surplus
from common.formats.reading import Reading
from common.formats.values import PYTHON, json_string, object_of, read_value

_NAME = re.compile(r"[\w.-]*")
_NEXT_ARGUMENT = re.compile(r"[,\s]*")


def read_pythonic(reading: Reading, ends: tuple[str, ...] = (), *, offered: bool) -> Wait[None]:
    """Read a list of calls, or consecutive calls.

    `offered`: there is no marker, so the names must be those of offered tools, unless the list is
    the whole answer.
    """
    cursor = reading.cursor
    alone = reading.answer.fresh
    certain = alone or not offered
    in_list = bool((yield from cursor.accept("[")))
    held: list[Call] = []  # calls that count only if the whole list can be parsed
    count, unclosed = 0, False  # unclosed: the bracket at the end of the list is missing
    while True:
        yield from cursor.space()
        if in_list and (count or not offered) and (unclosed or (yield from cursor.accept("]"))):
            break
        call = yield from _read_call(reading, shown=certain)
        if offered and call.name not in reading.tools:
            if not alone:
                raise Unreadable
            certain = False
        with cursor.ahead():
            start = cursor.position
            yield from cursor.space()
            yield from cursor.accept(",", ";")
            yield from cursor.space()
            length = cursor.position - start
            another = (yield from cursor.peek()).isidentifier()
        if in_list:
            yield from cursor.space()
            unclosed = bool((yield from cursor.at(ends)))
            goes_on = unclosed or (yield from cursor.accept(","))
            if not goes_on and (yield from cursor.peek()) != "]":
                raise cursor.unreadable()
        elif another and ends:
            cursor.take(length)
        count += 1
        if certain:
            reading.call(call)
        else:
            held.append(call)
        reading.begun = certain and in_list
        if not in_list and not (another and ends):
            break
    if offered and not all(call.name in reading.tools for call in held):
        with cursor.ahead():
            yield from cursor.space()
            if not in_list or (yield from cursor.more()):
                raise Unreadable
    for call in held:
        reading.call(call)


def read_fenced_pythonic(reading: Reading, ends: tuple[str, ...]) -> Wait[None]:
    """Read calls that may be in a code block inside the family's markers."""
    cursor = reading.cursor
    fence = yield from cursor.accept("```")
    if fence:
        yield from cursor.run(re.compile(r"\w*"))
        yield from cursor.space()
    yield from read_pythonic(reading, (*ends, "```"), offered=False)
    yield from drop_surplus(cursor, (*ends, "```"))
    yield from cursor.accept_after_space(fence)


def _read_call(reading: Reading, *, shown: bool) -> Wait[Call]:
    cursor = reading.cursor
    name = yield from cursor.run(_NAME)
    if not name or not (name[0].isalpha() or name[0] == "_"):
        raise cursor.unreadable()
    if (bare := name.removesuffix(".call")) in reading.tools:  # Llama 3's built-in tools
        name = bare
    yield from cursor.expect("(")
    arguments: list[tuple[str, str]] = []
    if shown:
        reading.begin(name)
    while True:
        yield from cursor.run(_NEXT_ARGUMENT)
        if (yield from cursor.accept(")")):
            return Call(name, object_of(arguments))
        key = yield from _read_keyword(reading)
        if key is None:
            given = {k for k, _ in arguments}
            key = next((k for k in reading.tools.properties(name) if k not in given), None)
        if key is None:
            raise Unreadable
        reading.send(("{" if not arguments else ", ") + json_string(key) + ": ")
        arguments.append((key, (yield from read_value(cursor, PYTHON, send=reading.send))))
        yield from cursor.space()
        if (yield from cursor.peek()) not in (",", ")"):
            raise cursor.unreadable()


def _read_keyword(reading: Reading) -> Wait[str | None]:
    """The name before an equals sign; None, without reading, for a positional argument."""
    cursor = reading.cursor
    with cursor.ahead():
        start = cursor.position
        name = yield from cursor.run(_NAME)
        yield from cursor.space()
        if not (yield from cursor.more()):
            raise cursor.unreadable()
        equals = bool(name) and bool((yield from cursor.accept("=")))
        length = cursor.position - start
    if not equals:
        return None
    cursor.take(length)
    yield from cursor.space()
    return name
