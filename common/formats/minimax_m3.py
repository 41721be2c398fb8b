"""MiniMax M3: an element for every argument, and inside it one for every member and entry.

Each tag has the same token before it, so values need no escapes. Only the tool's schema says of
which type a value is, and whether elements are members of an object or entries of a list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from common.formats.answer import Call
from common.formats.cursor import Markers, Wait
from common.formats.json_text import json_string
from common.formats.reading import CallSyntax, Reading
from common.formats.tagged_calls import ValueSender, attributes_of
from common.formats.values import object_of

MARK = "]<]minimax[>["
_BLOCK, _CALL = f"{MARK}<tool_call>", f"{MARK}<invoke"
_BLOCK_END, _CALL_END = f"{MARK}</tool_call>", f"{MARK}</invoke>"
_MARKS = Markers([MARK])
_HEADER, _KEY = re.compile(r"[^<>\n]*"), re.compile(r"[^<>/\s]*")
_ENTRY = "item"
_DEEPEST = 50
Path = tuple[str | None, ...]


def _read(reading: Reading) -> Wait[None]:
    """Read a block of calls, or calls without the block's tags."""
    cursor = reading.cursor
    yield from cursor.accept(_BLOCK)
    count = 0
    while True:
        start = cursor.position
        with cursor.ahead():
            yield from cursor.space()
            space = cursor.position - start
            found = yield from cursor.at([_CALL])
        if not found:
            break
        cursor.take(space + len(_CALL))
        reading.call((yield from _read_call(reading)))
        count += 1
    yield from cursor.accept_after_space(_BLOCK_END)
    if not count:
        raise cursor.unreadable()


def _read_call(reading: Reading) -> Wait[Call]:
    cursor = reading.cursor
    header = yield from cursor.run(_HEADER)
    yield from cursor.expect(">")
    name = reading.tools.meant(attributes_of(header).get("name", ""))
    if not name:
        raise cursor.unreadable()
    reading.begin(name)
    arguments = yield from _read_members(reading, name, (), _CALL_END)
    return Call(name, object_of(arguments))


def _read_members(reading: Reading, name: str, path: Path, end: str) -> Wait[list[tuple[str, str]]]:
    """Read elements up to the end of the one around them: keys, and values as JSON."""
    cursor = reading.cursor
    if len(path) > _DEEPEST:
        raise cursor.unreadable()
    found: list[tuple[str, str]] = []
    while True:
        yield from cursor.space()
        if (yield from cursor.accept(end)):
            return found
        if found and not path and (yield from cursor.at([_CALL, _BLOCK_END])):
            return found  # its end is missing
        if found and not path and not (yield from cursor.more()) and not reading.was_cut():
            return found
        yield from cursor.expect(f"{MARK}<")
        key = yield from cursor.run(_KEY)
        yield from cursor.expect(">")
        if not key:
            raise cursor.unreadable()
        is_entry = key == _ENTRY and "object" not in reading.tools.types_at(name, path)
        place = (*path, None if path and is_entry else key)
        send = _discard if path else reading.send
        send(("{" if not found else ", ") + json_string(key) + ": ")
        is_text = partial(reading.tools.is_text, name, key, undeclared="text")
        value = ValueSender(send, is_text)
        found.append((key, (yield from _read_value(reading, name, place, key, value))))
        value.whole(found[-1][1])


def _read_value(reading: Reading, name: str, path: Path, key: str, value: ValueSender) -> Wait[str]:
    """Read text, or the elements inside, and the closing tag; returns the value as JSON."""
    cursor = reading.cursor
    chunks: list[str] = []

    def add(text: str) -> None:
        chunks.append(text)
        value.add(text)

    yield from cursor.inside(_MARKS, add)
    text, end = "".join(chunks), f"{MARK}</{key}>"
    if (yield from cursor.accept(end)):
        return reading.tools.typed_at(name, path, text)
    if text.strip() or value.sent:
        raise cursor.unreadable()
    value.stop()
    members = yield from _read_members(reading, name, path, end)
    return _container(members, reading.tools.types_at(name, path))


def _container(members: Sequence[tuple[str, str]], types: frozenset[str]) -> str:
    """A list of entries; or an object, in which a repeated member is a list."""
    if "object" not in types and ("array" in types or all(key == _ENTRY for key, _ in members)):
        return "[" + ", ".join(value for _, value in members) + "]"
    values: dict[str, list[str]] = {}
    for key, value in members:
        values.setdefault(key, []).append(value)
    return object_of(
        [
            (key, several[0] if len(several) == 1 else f"[{', '.join(several)}]")
            for key, several in values.items()
        ]
    )


def _discard(_text: str) -> None:
    pass


CALLS = (CallSyntax((_BLOCK, _CALL), _read, (_BLOCK_END, _CALL_END)),)
