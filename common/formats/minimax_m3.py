"""MiniMax M3: an element for every argument, and inside it one for every member and entry.

Each tag has the same token before it, so values need no escapes. Only the tool's schema says of
which type a value is, and whether elements are members of an object or entries of a list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.formats.cursor import Cursor, Markers, Wait
from common.formats.reading import Reading
from common.formats.tag_spelling import openings
from common.formats.tagged_calls import CallTags, Tag
from common.formats.value_sender import ValueSender
from common.formats.values import object_of

MARK = "]<]minimax[>["
_MARKS = Markers(openings(MARK))
_KEY, _KEY_IN_ATTRIBUTE = re.compile(r"[^<>/\s]*"), re.compile(r'[^<>"]+')
_ENTRY = "item"
_DEEPEST = 50
Path = tuple[str | None, ...]


class ElementTags(CallTags):
    """An argument's tag is its key."""

    def _opens_parameter(self, cursor: Cursor) -> Wait[str]:
        others = (self.call, self.block, self.block_close, self.call_close)
        if (yield from cursor.at([form for tag in others for form in openings(tag)])):
            return ""
        return (yield from cursor.accept(*openings(self.parameter)))

    def _next_key(self, _reading: Reading) -> Wait[str | None]:
        """Return None: a tag inside an argument is a member, even one with the same key."""
        yield from ()
        return None

    def _read_parameter_header(self, cursor: Reading, begun: str) -> Wait[Tag]:
        if begun == MARK:  # only the closing tag has the key
            with cursor.ahead():
                yield from cursor.inside(_MARKS, lambda _text: None)
                yield from cursor.expect(f"{MARK}</")
                key = yield from cursor.run(_KEY)
            yield from cursor.accept(f"{key}>")
            return Tag(key)
        word = yield from cursor.run(_KEY)
        named = yield from cursor.accept_all(' name="', _KEY_IN_ATTRIBUTE, '"')  # as M2 writes it
        yield from cursor.expect(">")
        if not word:
            raise cursor.unreadable()
        return Tag(named[1] if named else word, close=f"</{word}>")

    def _read_value(self, reading: Reading, value: ValueSender) -> Wait[str]:
        end = MARK + value.ends[0] if len(value.ends) == 1 else ""
        return (yield from _read_element(reading, value.tool, (), value.key, value, end))


def _read_element(
    reading: Reading,
    name: str,
    path: Path,
    key: str,
    value: ValueSender | None = None,
    end: str = "",
) -> Wait[str]:
    """Read text, or the elements inside, and the closing tag; returns the value as JSON.

    end: the closing tag, if it has not the key.
    """
    tools = reading.tools
    is_entry = path and key == _ENTRY and "object" not in tools.types_at(name, path)
    path = (*path, None if is_entry else key)
    chunks: list[str] = []

    def add(text: str) -> None:
        chunks.append(text)
        if value:
            value.add(text)

    yield from reading.inside(_MARKS, add)
    text = "".join(chunks)
    ends = openings(end or f"{MARK}</{key}>")
    if (yield from reading.accept(*ends)):
        return tools.typed_at(name, path, text)
    if text.strip() or (value and value.sent) or len(path) > _DEEPEST:
        raise reading.unreadable()
    if value:
        value.stop()
    members: list[tuple[str, str]] = []
    while not (yield from reading.accept(*ends)):
        yield from reading.expect(*openings(f"{MARK}<"))
        inner = yield from reading.run(_KEY)
        yield from reading.expect(">")
        if not inner:
            raise reading.unreadable()
        members.append((inner, (yield from _read_element(reading, name, path, inner))))
        yield from reading.space()
    return _container(members, tools.types_at(name, path))


def _container(members: Sequence[tuple[str, str]], types: frozenset[str]) -> str:
    """Return a list of entries; or an object, in which a repeated member is a list."""
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
