"""Parses one argument value, in JSON or a family's dialect of it, and returns it as JSON text.

Text that is already JSON is kept as the model wrote it, so that integers beyond 2^53, exponents and
key order survive. Raw control characters and unknown escapes in strings, which models write but
JSON forbids, are escaped. Nesting is tracked in a list, not on the call stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.formats.cursor import KEY, SPACE, WORD, Cursor, Unreadable, Wait, complete, markers_of
from common.formats.fenced_strings import KEY_RUN, Place, at_key, read_bare, read_fenced, read_raw
from common.formats.json_text import NUMBER, Send, escaped, json_string, number_of
from common.formats.string_literals import (
    at_literal,
    read_literal,
    read_literals,
    read_quoted,
    read_source,
)

_BASED_NUMBER = re.compile(r"0(?:x[0-9a-fA-F]{1,99}|o[0-7]{1,99}|b[01]{1,99})")
_POINT = re.compile(r"(?<=[0-9])\.\Z")
_GROUPED = re.compile(r"(?<=[0-9])_(?=[0-9])")
_DEEPEST_TERM = 8  # brackets inside more brackets are not looked at, so that time stays linear
_LINE = re.compile(r"[^\n]*")
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z_]*")


_CLOSERS = {"{": "}", "[": "]", "(": ")", "set": "}"}
_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {**_JSON_WORDS, "True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the notation of values differs from JSON."""

    words: Mapping[str, str] = field(default_factory=lambda: _JSON_WORDS)
    fence: str = ""
    """The delimiter around a string that is written raw."""
    bare: bool = False
    """Keys, and strings of a single line, may have no quotes."""
    python: bool = False
    """Any Python expression that is no value is a string of its source."""
    single_quotes: bool = False
    loose: bool = False
    """A value without quotes, a quote inside a string and a missing comma are repaired."""


JSON = Dialect()
_NOT_FINITE = dict.fromkeys(("NaN", "Infinity", "-Infinity"), "null")
MODEL_JSON = Dialect({**_PYTHON_WORDS, **_NOT_FINITE}, single_quotes=True, loose=True)
"""JSON as models write it: sometimes with Python's words and quotes, or with NaN and Infinity,
which JSON does not have.
"""
GEMMA4 = Dialect(_PYTHON_WORDS, fence='<|"|>', bare=True)
PYTHON = Dialect(_PYTHON_WORDS, fence=GEMMA4.fence, python=True, single_quotes=True)
PYTHON_JSON = Dialect(_PYTHON_WORDS, single_quotes=True)
"""JSON with Python's words and quotes as well."""


Pairs = Sequence[tuple[str, str]]
"""Members of an object in order: keys, and values as JSON."""


def object_of(arguments: Pairs) -> str:
    """Return a JSON object of values that are already JSON; of repeated keys, the last applies."""
    return "{" + ", ".join(f"{json_string(k)}: {v}" for k, v in arguments) + "}"


class MemberReceiver(Protocol):
    """Receives the members of an object, each when its value begins."""

    def member(self, key: str, head: str, /) -> Send | None:
        """Accept a key as JSON and its value's first character; return the value's receiver."""

    def inside(self, key: str, /) -> MemberReceiver | None:
        """Return the receiver for the members of a value that is an object."""


class _JsonOutput:
    """The JSON of a value as far as it has been read; pieces are sent when they are certain."""

    __slots__ = ("_comma", "_texts", "misquoted", "send", "send_member", "unclosed")

    def __init__(self, send: Send | None) -> None:
        self._texts: list[str] = []
        self._comma: list[str] = []  # a comma, which may turn out to be superfluous, and space
        self.send = send
        self.send_member: Send | None = None
        self.unclosed = False  # text without delimiters went on to the end of the answer
        self.misquoted = False  # an apostrophe was at the beginning of text without delimiters

    def add(self, text: str) -> None:
        if not text:
            return
        if self._comma:
            self._comma.append(text)
            return
        self._texts.append(text)
        if self.send:
            self.send(text)
        if self.send_member:
            self.send_member(text)

    def comma(self, text: str) -> None:
        self._comma = [text]

    def after_comma(self, *, item: bool) -> None:
        """Handle what follows a comma: an item, or the bracket that makes it superfluous."""
        held, self._comma = self._comma, []
        self.add("".join(held if item else held[1:]))

    def closed(self, brackets: Sequence[str]) -> str:
        """Close the brackets, whose ends are missing, and return the complete text."""
        self.after_comma(item=False)
        self.send_member = None
        self.add("".join("}" if bracket == "{" else "]" for bracket in reversed(brackets)))
        return self.text()

    def text(self) -> str:
        return "".join(self._texts)


def read_value(
    cursor: Cursor,
    dialect: Dialect = JSON,
    ends: tuple[str, ...] = (),
    *,
    send: Send | None = None,
    receiver: MemberReceiver | None = None,
    converter: Callable[[str], Callable[[str], str] | None] = lambda _key: None,
    declared: Mapping[str, bool] | None = None,
    unbraced: bool = False,
) -> Wait[str]:
    """Return the next value as JSON.

    ends: markers at which open brackets are closed.
    send: called with each piece of that JSON as soon as it is certain.
    receiver: called in the same way with the members of an object.
    converter: the function that converts a member, by the member's key as JSON.
    declared: the declared members, and whether each may be a string, so that its delimiters may be
        missing.
    unbraced: whether the value is an object without its first brace.
    """
    out = _JsonOutput(send)
    stack: list[str] = []
    levels: list[MemberReceiver | None] = []  # the receiver for the members of each open bracket
    member_depth = 0
    state, key, fences = "value", "", False
    if unbraced:
        stack, levels, state = ["{"], [receiver], "first"
        out.add("{")
    while True:
        space = yield from cursor.space()
        out.add(space if dialect is JSON and stack else "")
        head = yield from cursor.peek()
        loose = dialect.python or dialect.loose
        if dialect.loose and head == "/" and state != "value":
            yield from _read_comment(cursor)
            continue
        fenced = dialect.loose and stack and state == ("next" if fences else "value")
        if fenced and head == "`" and (yield from cursor.accept("```")):  # around a value
            if state == "value":
                yield from cursor.run(WORD)
            fences = not fences
            continue
        between = stack and (state == "next" or (loose and state != "value"))
        over = between and not head and cursor.stopped
        over = over and (dialect.loose or out.unclosed or (dialect.bare and state == "next"))
        if over or (between and ends and (yield from cursor.at(ends))):
            return out.closed(stack)
        if (
            (loose or dialect.bare)
            and state in ("first", "key", "item")
            and (yield from cursor.accept(","))
        ):
            continue  # a comma too many
        if dialect.python and stack and state == "next" and head not in ("", ",", ")", "]", "}"):
            yield from read_source(cursor)  # what is behind a value, such as `[0]`
            continue
        closes = stack and state in ("next", "first", "key", "item")
        closers = tuple(_CLOSERS[opening] for opening in stack[-1:])
        if loose:  # another bracket also closes the ones inside it
            closers += (")", "]", "}") if dialect.python else ("]", "}")
        closes = closes and head in closers
        if state == "first" and stack[-1] == head == "{" and dialect.loose:
            cursor.take(1)  # written twice
            continue
        if state == "key" and head == "{" and dialect.loose:  # the next call of a list
            return out.closed(stack)
        if state in ("key", "item"):
            if not head:
                raise cursor.unreadable()
            out.after_comma(item=not closes)
        if closes:
            cursor.take(1 if head == _CLOSERS[stack[-1]] else 0)
            out.add("]" if stack.pop() != "{" else "}")
            levels.pop()
            state = "next"
        elif state == "next":
            member = stack[-1] == "{" and (yield from _at_member(cursor, dialect))
            if not member:
                yield from cursor.expect(",")
            out.comma("," if dialect is JSON else ", ")
            state = "key" if stack[-1] == "{" else "item"
        elif stack and stack[-1] == "{" and state in ("first", "key"):
            key = yield from _read_key(cursor, dialect, ends)
            yield from cursor.space()
            signs = (":", "=", "=>") if dialect.bare or dialect.loose else (":",)
            optional = dialect.python or (dialect.loose and head == "-")
            valued = yield from (cursor.accept if optional else cursor.expect)(*signs)
            valued = valued or ("" if dialect.python else head)
            out.add(key + (":" if dialect is JSON else ": ") + ("" if valued else "null"))
            state = "value" if valued else "next"
        else:
            level = levels[-1] if levels and state == "value" else None
            if level:
                out.send_member, member_depth = level.member(key, head), len(stack)
            looked_at = dialect.python and head == "(" and len(stack) < _DEEPEST_TERM
            term = looked_at and (yield from _is_term(cursor, ends))
            if head in ("{", "[") or (head == "(" and dialect.python and not term):
                inner = receiver if not stack else level and level.inside(key)
                levels.append(inner if head == "{" else None)
                is_set = (
                    dialect.python and head == "{" and (yield from _is_set(cursor, dialect, ends))
                )
                stack.append("set" if is_set else head)
                cursor.take(1)
                out.add("{" if stack[-1] == "{" else "[")
                state = "first"
            else:
                convert = converter(key) if len(stack) == 1 else None
                whole = _JsonOutput(None) if convert else out
                if dialect.bare:
                    known = declared if declared and len(stack) == 1 else {}
                    free = state == "value" and known.get(string_of(key) or "", False)
                    listed = stack[-1:] != ["{"]
                    place = Place(dialect.fence, ends, len(stack), listed, free, known)
                    yield from _read_unquoted_scalar(cursor, dialect, whole, place, space)
                else:
                    inside = stack[-1] if stack else ""
                    yield from _read_scalar(cursor, dialect, whole, ends, inside=inside)
                if convert:
                    out.add(convert(whole.text()))
                state = "next"
        if state == "next" and len(stack) <= member_depth:
            out.send_member = None
        if state == "next" and not stack:
            return out.text()


def _read_comment(cursor: Cursor) -> Wait[None]:
    """Read a comment in the notation of JavaScript."""
    if (yield from cursor.expect("//", "/*")) == "//":
        yield from cursor.run(_LINE)
        return
    yield from cursor.inside(markers_of("*/"), lambda _text: None)
    cursor.take(2)


def _at_member(cursor: Cursor, dialect: Dialect) -> Wait[bool]:
    """Return whether a key comes next, so that the comma before it is missing."""
    if not (dialect.loose or dialect.bare):
        return False
    with cursor.ahead():
        if dialect.bare:
            return (yield from at_key(cursor))
        if (yield from _read_loose_key(cursor)):
            return True
        if not (yield from _read_string(cursor, dialect, lambda _text: None)):
            return False
        yield from cursor.space()
        return bool((yield from cursor.at([":"])))


def _is_term(cursor: Cursor, ends: tuple[str, ...]) -> Wait[bool]:
    """Return whether the brackets that come next are a part of a longer Python expression."""
    with cursor.ahead():
        cursor.take(1)
        yield from read_source(cursor, ends, stops=())
        cursor.take(1)
        return bool((yield from read_source(cursor, ends)))


def _is_set(cursor: Cursor, dialect: Dialect, ends: tuple[str, ...]) -> Wait[bool]:
    """Return whether the next brace opens a set: no colon follows its first item."""
    with cursor.ahead():
        cursor.take(1)
        yield from cursor.space()
        head = yield from cursor.peek()
        if head in _CLOSERS or head == "}":
            return head != "}"
        yield from _read_scalar(cursor, dialect, _JsonOutput(None), ends, stops=(",", ":"))
        yield from cursor.space()
        if not (yield from cursor.more()):
            raise cursor.unreadable()
        return (yield from cursor.peek()) in (",", "}")


def _read_key(cursor: Cursor, dialect: Dialect, ends: tuple[str, ...]) -> Wait[str]:
    if dialect.python:
        out = _JsonOutput(None)
        yield from _read_scalar(cursor, dialect, out, ends, stops=(",", ":"))
        return out.text() if out.text().startswith('"') else json_string(out.text())
    chunks: list[str] = []
    if dialect.fence and (yield from cursor.accept(dialect.fence)):
        place = Place(dialect.fence, ends)
        yield from read_fenced(cursor, place, chunks.append)
        return "".join(chunks)
    key = (yield from _read_loose_key(cursor)) if dialect.loose else ""
    if not key and (yield from _read_string(cursor, dialect, chunks.append)):
        return "".join(chunks)
    if dialect.bare:
        key = (yield from cursor.run(KEY_RUN)).rstrip()
    if key and (yield from cursor.more()):
        return json_string(key)
    raise cursor.unreadable()


def _read_loose_key(cursor: Cursor) -> Wait[str]:
    """Read a key without quotes, or with one missing, or with an equals sign after it.

    Also read an option of a command line, `--KEY`. Returns '' for another key, and reads nothing.
    """
    if option := (yield from cursor.accept_all("--", KEY)):
        return option[1]
    found = yield from cursor.follow(('"', ""), KEY, ('"', ""), SPACE, (":", "="))
    opened, key, closed, space, sign = found or ("", "", "", "", "")
    if opened and sign == ":":
        return ""
    if opened and not closed:  # an equals sign may be a part of a key
        quoted = (yield from cursor.follow('"', KEY, "=", '"', SPACE)) if not space else ()
        with cursor.ahead():
            cursor.take(sum(map(len, quoted)))
            if not quoted or (yield from cursor.peek()) == ":":
                return ""
    cursor.take(len(opened + key + closed))
    return key


def _read_string(
    cursor: Cursor, dialect: Dialect, add: Send, inside: str = "", ends: tuple[str, ...] = ()
) -> Wait[bool]:
    """Read a quoted string if one comes next; returns whether it did.

    inside: the bracket around it if it is a value or an item.
    """
    head = yield from cursor.peek()
    typographic = head == "“" and (dialect.loose or dialect.python)
    loose = inside and head == '"' and dialect.loose
    if loose and (length := (yield from _embedded_length(cursor))):
        add(json_string(cursor.take(length)[1:-1]))
        return True
    tripled = loose and (yield from cursor.at(['"""']))
    if typographic or tripled or (head == "'" and dialect.single_quotes):
        add('"')
        yield from read_literal(cursor, add)
        add('"')
    elif head == '"':
        yield from read_quoted(cursor, add, dialect.loose, inside, ends)
    return typographic or (head == "'" and dialect.single_quotes) or head == '"'


def _embedded_length(cursor: Cursor) -> Wait[int]:
    """Return the length of a string that is JSON with unescaped quotes; 0 if none comes next."""
    start = cursor.position
    with cursor.ahead():
        if not (yield from cursor.accept_all('"', SPACE)):
            return 0
        # In JSON no word comes directly behind a string, such as `"{"`.
        begins = (("{", "["), SPACE, ("{", "[", ""), SPACE, '"', KEY)
        if not (yield from cursor.follow(*begins)):
            return 0
        try:
            yield from read_value(cursor)
            yield from cursor.space()
            yield from cursor.expect('"')
        except Unreadable:
            return 0
        return cursor.position - start


def _read_scalar(
    cursor: Cursor,
    dialect: Dialect,
    out: _JsonOutput,
    ends: tuple[str, ...],
    stops: tuple[str, ...] = (",",),
    inside: str = "",
) -> Wait[None]:
    if dialect.python and (yield from cursor.accept(dialect.fence)):
        yield from read_fenced(cursor, Place(dialect.fence, ends, depth=0), out.add)
        return
    if dialect.python and (yield from at_literal(cursor)):
        out.add('"')
        quote = yield from read_literals(cursor, out.add)
        rest = yield from read_source(cursor, ends, stops)
        out.add(escaped(quote + rest.rstrip() if rest.strip() else "") + '"')
        return
    if dialect.python and (yield from cursor.peek()) != "“":
        text = (yield from read_source(cursor, ends, stops)).strip()
        scalar = _scalar(text, dialect)
        if scalar is None and not (yield from cursor.more()):
            raise cursor.unreadable()
        out.add(scalar or json_string(text))
        return
    if (yield from _read_string(cursor, dialect, out.add, inside, ends)):
        return
    if dialect.loose:
        if inside and (yield from cursor.peek()) == "`":
            raw = yield from read_raw(cursor, Place("", ends))
            if raw is not None:
                out.add(json_string(raw))
                return
        text = (yield from read_source(cursor, ends, (",", "\n", '"'))).strip()
        if not (yield from cursor.more()):
            raise cursor.unreadable()
        if (yield from cursor.follow('"', SPACE, (",", "}", "]"))):
            cursor.take(1)  # its first quote is missing
        out.add(_scalar(text, dialect) or (json_string(text) if text else "null"))
        return
    text = yield from cursor.run(_SCALAR_RUN)
    scalar = _scalar(text, dialect)
    if scalar is None:
        raise cursor.unreadable()
    out.add(scalar)


def _scalar(text: str, dialect: Dialect) -> str | None:
    """Return a word or a number as JSON; None for any other text."""
    if text in dialect.words or NUMBER.fullmatch(text):
        return dialect.words.get(text, text)
    if dialect.python and _BASED_NUMBER.fullmatch(text):
        return str(int(text, 0))
    if dialect.python:
        text = _GROUPED.sub("", text)
    elif not dialect.loose or text.startswith("0"):  # rather a code than a number
        return None
    return number_of(_POINT.sub(".0", text))


def _read_unquoted_scalar(
    cursor: Cursor, dialect: Dialect, out: _JsonOutput, place: Place, space: str
) -> Wait[None]:
    """Read a string between fences or other delimiters, or a value without any.

    space: what comes before the value.
    """
    if (yield from cursor.accept(*place.fences)):
        yield from read_fenced(cursor, place, out.add)
        return
    head = yield from cursor.peek()
    if head in ("'", "`") and not out.misquoted:
        text = yield from read_raw(cursor, place)
        if text is not None:
            out.add(json_string(text))
            return
        out.misquoted = True
    if (yield from _read_string(cursor, dialect, out.add)):
        with cursor.ahead():
            yield from cursor.space()
            surplus = yield from cursor.at([place.fence])
        if surplus:
            yield from cursor.space()
            cursor.take(len(surplus))
        return
    text = yield from read_bare(cursor, place)
    out.unclosed = not (yield from cursor.more())
    bare = text.strip()
    known = _scalar(bare, dialect) or (bare.endswith(".") and _scalar(f"{bare}0", dialect))
    value = known or json_string(bare)
    if place.free and "\n" in space + text and value.startswith('"'):
        value = json_string(space + text)
    out.add(value)


def as_json(text: str, dialect: Dialect = JSON) -> str | None:
    """Return a complete text as JSON; None if it is not a single value."""
    return complete(lambda cursor: read_value(cursor, dialect), text)


_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}:,]|[^][{}:,"\s]+')


def parts(text: str) -> list[tuple[str, str]]:
    """Return the members of a JSON object as key and raw value, or a list's items with empty keys.

    The text must be valid JSON, as `read_value` returns it.
    """
    depth, start, key = 0, 0, ""
    found: list[tuple[str, str]] = []
    for token in _TOKEN.finditer(text):
        symbol = token.group()
        if symbol in ("{", "["):
            depth += 1
            if depth == 1:
                start = token.end()
        elif depth == 1 and symbol == ":":
            key = string_of(text[start : token.start()].strip()) or ""
            start = token.end()
        elif (depth == 1 and symbol == ",") or symbol in ("}", "]"):
            depth -= symbol in ("}", "]")
            if depth == (symbol == ","):
                if value := text[start : token.start()].strip():
                    found.append((key, value))
                start, key = token.end(), ""
    return found


def string_of(text: str) -> str | None:
    """Return the decoded text of a JSON string; None for any other value."""
    if not text.startswith('"'):
        return None
    if "\\" not in text:
        return text[1:-1]
    decoded: str = json.loads(text)
    return decoded
