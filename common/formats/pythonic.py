"""Calls written as Python calls, in a list or alone: `[get_weather(city='Rome')]`."""

from __future__ import annotations

import re

from common.formats.answer import Call
from common.formats.cursor import SPACE, WORD, Cursor, Unreadable, Wait
from common.formats.json_text import json_string
from common.formats.reading import CallSyntax, Reading, begins_line
from common.formats.string_literals import read_source
from common.formats.values import PYTHON, Pairs, object_of, parts, read_value

NAME = re.compile(r"[\w.:/-]*")
_KEYWORD = re.compile(r"[\w.-]*")
_TYPES = frozenset("str string int integer float number bool boolean list dict object".split())
_STATEMENT_SPACE = re.compile(r"[\s,;]*")
_CODE_ENDS = ("```", "</tool_code>")
_SEPARATOR = re.compile(r"[,\s}]*")
_SURPLUS = re.compile(r"[)}\s]*")


def read_pythonic(reading: Reading, ends: tuple[str, ...] = (), *, offered: bool) -> Wait[None]:
    """Read a list of calls, or consecutive calls.

    `offered`: there is no marker, so the names must be those of offered tools, unless the list is
    the whole answer.
    """
    alone = reading.answer.fresh
    certain = alone or not offered
    in_list = bool((yield from reading.accept("[", "[[")))
    pending: list[Call] = []  # calls that count only if the whole list can be parsed
    count, unclosed = 0, False  # unclosed: the bracket at the end of the list is missing
    while True:
        yield from reading.space()
        if in_list and (count or not offered) and (unclosed or (yield from reading.accept("]"))):
            break
        yield from _skip_statement(reading)
        call = yield from _read_call(reading, ends, shown=certain)
        if offered and call.name not in reading.tools:
            if not alone:
                raise Unreadable
            certain = False
        count += 1
        if certain:
            reading.call(call)
        else:
            pending.append(call)
        reading.begun = certain and in_list
        with reading.ahead():
            length = sum(map(len, (yield from reading.accept_all(SPACE, (",", ";", ""), SPACE))))
            another = (yield from reading.peek()).isidentifier()
        if in_list:
            yield from reading.space()
            if certain:
                yield from reading.run(_SURPLUS)
            unclosed = bool((yield from reading.at(ends)))
            unclosed = unclosed or (reading.stopped and not (yield from reading.more()))
            goes_on = unclosed or (yield from reading.accept(",", ";")) or (certain and another)
            if not goes_on and (yield from reading.peek()) != "]":
                raise reading.unreadable()
        elif another and ends:
            reading.take(length)
        if not in_list and not (another and ends):
            break
    known = not offered or all(call.name in reading.tools for call in pending)
    if not known and not (in_list and (yield from reading.is_last())):
        raise Unreadable
    for call in pending:
        reading.call(call)


def at_named_call(reading: Reading) -> Wait[str]:
    """Return the bracket after an offered tool's name that comes next, perhaps in a list; else ''.

    The name of the first argument, if it has one, must be declared. A signature is no call.
    """
    with reading.ahead():
        listed, _, word = yield from reading.accept_all(("[", ""), SPACE, NAME)
        name = reading.tools.meant(word)
        if word.startswith("call:") or name not in reading.tools:
            return ""
        _, head = yield from reading.accept_all(SPACE, ("(", "{", ""))
        if head == "(":
            yield from reading.space()
            if (yield from _is_parameter(reading, name)):
                return ""
            key = yield from _read_keyword(reading, name)
            if key is not None and key not in reading.tools.properties(name):
                return ""
    return "" if head == "{" and listed else head


def _is_parameter(reading: Reading, name: str) -> Wait[bool]:
    """Return whether a declared parameter without a value comes next, so that this is no call."""
    parts = (_KEYWORD, SPACE, (":", ""), SPACE, WORD, (",", ")", ""))
    word, _, typed, _, text, end = yield from reading.follow(*parts)
    ends = text.lower() in _TYPES if typed else end and not text
    return bool(ends) and word in reading.tools.properties(name)


def _read_tool_code(reading: Reading) -> Wait[None]:
    """Read a marked block of code."""
    reading.take(len(reading.opener))
    reading.begun = not reading.opener.isidentifier()
    yield from read_statements(reading)


def read_statements(reading: Reading) -> Wait[None]:
    """Read calls as statements of a program, whose results may be assigned or printed."""
    variable, called = "tool_code", False
    while True:
        with reading.ahead() as keep:
            yield from reading.run(_STATEMENT_SPACE)
            assigned = (yield from _read_assigned(reading)) or variable
            printed = yield from reading.accept("print(")
            only_printed = printed and (yield from reading.accept(f"{variable})"))
            another = yield from at_named_call(reading)
            if called and not (only_printed or another):
                break
            keep()
        if only_printed:
            continue
        variable = assigned
        call = yield from _read_call(reading, _CODE_ENDS, shown=True)
        if call.name not in reading.tools:
            raise Unreadable
        called = True
        reading.call(call)
        if printed:
            yield from reading.accept_after_space(")")
    yield from reading.drop_surplus(_CODE_ENDS)
    yield from reading.accept_after_space(*_CODE_ENDS)


def _skip_statement(cursor: Cursor) -> Wait[None]:
    """Read what models write before a call in a list, as if it were a statement."""
    yield from _read_assigned(cursor)
    yield from cursor.accept("await ", "print(")


def _read_assigned(cursor: Cursor) -> Wait[str]:
    """Read a variable and an equals sign; returns the variable, '' if there is none."""
    found = yield from cursor.accept_all(_KEYWORD, SPACE, "=", SPACE)
    return found[0] if found else ""


def read_fenced_pythonic(
    reading: Reading, ends: tuple[str, ...], *, offered: bool = False
) -> Wait[None]:
    """Read calls that may be in a code block inside the family's markers."""
    fence = yield from read_fence(reading)
    yield from read_pythonic(reading, (*ends, "```"), offered=offered)
    yield from reading.drop_surplus((*ends, "```"))
    yield from reading.accept_after_space(fence)


def read_fence(cursor: Cursor) -> Wait[str]:
    """Read space, and the first line of a code block if one begins here; returns its fence."""
    yield from cursor.space()
    found = yield from cursor.accept_all("```", WORD, SPACE)
    return found[0] if found else ""


def _read_call(reading: Reading, ends: tuple[str, ...], *, shown: bool) -> Wait[Call]:
    quote = yield from reading.accept("`", '"', "'")
    name = yield from reading.run(NAME)
    yield from reading.accept(quote)
    if not (name[:1].isalpha() or name[:1] == "_"):
        raise reading.unreadable()
    name = reading.tools.meant(name)
    if name in reading.tools:
        yield from reading.space()
    if name in reading.tools and (yield from reading.at(["{"])):
        reading.begin(name)
        return Call(name, (yield from read_value(reading, PYTHON, ends, send=reading.send)))
    yield from reading.expect("(")
    return Call(name, (yield from read_parenthesis(reading, name, ends, shown=shown)))


def read_parenthesis(
    reading: Reading, name: str, ends: tuple[str, ...], *, shown: bool = True
) -> Wait[str]:
    """Read arguments after an opening parenthesis; returns them as a JSON object."""
    arguments: list[tuple[str, str]] = []
    if shown:
        reading.begin(name)
    while not (yield from _is_over(reading, ends)):
        key = yield from _read_keyword(reading, name)
        if key is None and not arguments:
            arguments += yield from _read_mapping(reading, name, ends)
            if arguments:
                reading.send(object_of(arguments)[:-1])
                continue
        if key is None:
            given = {k for k, _ in arguments}
            key = next((k for k in reading.tools.properties(name) if k not in given), None)
        if key is None and name not in reading.tools:
            raise Unreadable
        send = reading.send if key is not None else None
        if key is not None:
            reading.send(("{" if not arguments else ", ") + json_string(key) + ": ")
        value = yield from read_value(reading, PYTHON, ends, send=send)
        yield from read_source(reading, ends)
        if key is not None:  # else there are more values than the tool has arguments
            arguments.append((key, value))
    if reading.over and reading.tools.lacks(name, (key for key, _ in arguments)):
        raise reading.unreadable()
    return object_of(arguments)


def _read_mapping(reading: Reading, name: str, ends: tuple[str, ...]) -> Wait[Pairs]:
    """Read a dictionary of the arguments, perhaps unpacked with `**`; none if it is a value."""
    tools = reading.tools
    with reading.ahead() as keep:
        unpacked = yield from reading.accept("**")
        found: Pairs = []
        if (yield from reading.peek()) == "{":
            found = parts((yield from read_value(reading, PYTHON, ends)))
        declared = tools.properties(name)
        is_value = not unpacked and declared and "object" in tools.types_at(name, declared[:1])
        if not found or is_value or not all(key in declared for key, _ in found):
            return []
        keep()
    return found


def _is_over(reading: Reading, ends: tuple[str, ...]) -> Wait[bool]:
    """Read the end of a call, or what separates its arguments; returns whether it was the end.

    The bracket may be missing before one of the ends, and where the model stopped after its list.
    """
    while True:
        yield from reading.run(_SEPARATOR)
        if (yield from reading.accept(")")) or (yield from reading.at(ends)):
            return True
        if reading.stopped and not (yield from reading.more()):
            return True
        if (yield from reading.peek()) != "]":
            return False
        with reading.ahead():
            yield from reading.accept_all("]", SPACE)
            more = yield from reading.more()
            if (yield from reading.at(ends)) or not (more or reading.was_cut()):
                return True
        reading.take(1)


def _read_keyword(reading: Reading, tool: str) -> Wait[str | None]:
    """Read the name before an equals sign, or a declared name, perhaps in quotes, before a colon.

    Returns None, and reads nothing, for a positional argument.
    """
    with reading.ahead() as keep:
        quote, name = yield from reading.accept_all(('"', "'", ""), _KEYWORD)
        yield from reading.accept_all((quote, ""), SPACE)
        if not (yield from reading.more()):
            raise reading.unreadable()
        declared = name in reading.tools.properties(tool)
        signs = ("=", ":") if declared else () if quote else ("=",)
        if not name or not (yield from reading.accept(*signs)):
            return None
        yield from reading.space()
        keep()
    return name


TOOL_CODE = CallSyntax(
    ("```tool_code", "<tool_code>", "<|tool_code|>", "tool_code"),
    _read_tool_code,
    begins=begins_line,
)
"""The block of Python that Gemma's earlier models were trained on, and later ones still write."""
