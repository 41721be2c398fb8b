"""Reads one value of an argument, in JSON or a family's dialect of it, and gives it as JSON text.

The text is kept as the model wrote it wherever it is JSON already, so that whole numbers beyond
2^53, exponents and the order of keys survive. Raw control characters and unknown escapes inside
strings, which models write and JSON forbids, are escaped. Nesting is a list, not a call stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.formats.cursor import Cursor, Markers, Wait, complete
from common.formats.python_strings import decoded_escapes

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z_]*")
_TEXT_RUN = re.compile(r"[^,{}\[\]<]*")
_KEY_RUN = re.compile(r"[^:,{}\[\]<\s]*")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {**_JSON_WORDS, "True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How values are written where it is not JSON."""

    words: Mapping[str, str] = field(default_factory=lambda: _JSON_WORDS)
    fence: str = ""
    """Stands before and after a string that is written raw."""
    bare: bool = False
    """Keys, and strings of a single line, may stand without quotes."""
    python: bool = False


JSON = Dialect()
GEMMA4 = Dialect(_PYTHON_WORDS, fence='<|"|>', bare=True)
FUNCTION_GEMMA = Dialect(_PYTHON_WORDS, fence="<escape>", bare=True)
PYTHON = Dialect(_PYTHON_WORDS, python=True)


def json_string(text: str) -> str:
    """A text as a JSON string that every encoder can carry: no lone surrogates."""
    written = json.dumps(text, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return written


def read_value(cursor: Cursor, dialect: Dialect = JSON, ends: tuple[str, ...] = ()) -> Wait[str]:
    """The next value as JSON. With `ends`, brackets that are still open at one of them close."""
    out: list[str] = []
    stack: list[str] = []
    state, comma = "value", 0
    while True:
        space = yield from cursor.space()
        out.append(space if dialect is JSON else "")
        head = yield from cursor.peek()
        if state == "next" and ends and stack and (yield from cursor.at(ends)):
            out.extend(_CLOSERS[opening].replace(")", "]") for opening in reversed(stack))
            return "".join(out).strip()
        if stack and head == _CLOSERS[stack[-1]] and state in ("next", "first", "key", "item"):
            cursor.take(1)
            if state in ("key", "item"):
                out[comma] = ""  # a trailing comma, which JSON forbids
            out.append("]" if stack.pop() != "{" else "}")
            state = "next"
        elif state == "next":
            yield from cursor.expect(",")
            comma = len(out)
            out.append("," if dialect is JSON else ", ")
            state = "key" if stack[-1] == "{" else "item"
        elif stack and stack[-1] == "{" and state in ("first", "key"):
            out.append((yield from _read_key(cursor, dialect)))
            yield from cursor.space()
            yield from cursor.expect(":")
            out.append(":" if dialect is JSON else ": ")
            state = "value"
        elif head in ("{", "[") or (head == "(" and dialect.python):
            stack.append(cursor.take(1))
            out.append("{" if head == "{" else "[")
            state = "first"
        else:
            out.append((yield from _read_scalar(cursor, dialect)))
            state = "next"
        if state == "next" and not stack:
            return "".join(out).strip()


def _read_key(cursor: Cursor, dialect: Dialect) -> Wait[str]:
    if dialect.fence and (yield from cursor.accept(dialect.fence)):
        return (yield from _read_fenced(cursor, dialect.fence))
    head = yield from cursor.peek()
    if head == '"' or (dialect.python and head == "'"):
        return (yield from _read_quoted(cursor, dialect))
    if dialect.bare and (key := (yield from cursor.run(_KEY_RUN))):
        return json_string(key)
    raise cursor.unreadable()


def _read_scalar(cursor: Cursor, dialect: Dialect) -> Wait[str]:
    if dialect.fence and (yield from cursor.accept(dialect.fence)):
        return (yield from _read_fenced(cursor, dialect.fence))
    head = yield from cursor.peek()
    if head == '"' or (dialect.python and head == "'"):
        return (yield from _read_quoted(cursor, dialect))
    if dialect.bare:
        bare = (yield from cursor.run(_TEXT_RUN)).strip()
        if not bare and (yield from cursor.peek()) not in (",", "}", "]"):
            raise cursor.unreadable()
        return _bare_value(bare, dialect)
    text = yield from cursor.run(_SCALAR_RUN)
    if text in dialect.words:
        return dialect.words[text]
    if NUMBER.fullmatch(text):
        return text
    raise cursor.unreadable()


def _bare_value(text: str, dialect: Dialect) -> str:
    if text in dialect.words:
        return dialect.words[text]
    if NUMBER.fullmatch(text):
        return text
    return f"{text}0" if text.endswith(".") and NUMBER.fullmatch(f"{text}0") else json_string(text)


def _read_fenced(cursor: Cursor, fence: str) -> Wait[str]:
    chunks: list[str] = []
    if not (yield from cursor.until(Markers([fence]), chunks.append)):
        raise cursor.unreadable()
    yield from cursor.expect(fence)
    return json_string("".join(chunks))


def _read_quoted(cursor: Cursor, dialect: Dialect) -> Wait[str]:
    if dialect.python:
        return (yield from _read_python_string(cursor))
    out = [cursor.take(1)]
    while True:
        out.append((yield from cursor.run(_STRING_RUN)))
        head = yield from cursor.peek()
        if head == '"':
            out.append(cursor.take(1))
            return "".join(out)
        if head == "\\":
            out.append((yield from _read_escape(cursor)))
        elif head:
            out.append(json.dumps(cursor.take(1))[1:-1])
        else:
            raise cursor.unreadable()


def _read_escape(cursor: Cursor) -> Wait[str]:
    """An escape as it is, or, where JSON does not know it, the two characters it is made of."""
    pair = yield from cursor.peek(2)
    if len(pair) < 2:
        cursor.rest()
        raise cursor.unreadable()
    if pair[1] == "u":
        whole = yield from cursor.peek(6)
        if re.fullmatch(r"\\u[0-9a-fA-F]{4}", whole):
            return cursor.take(6)
    elif pair[1] in '"\\/bfnrt':
        return cursor.take(2)
    cursor.take(1)
    return "\\\\"


def _read_python_string(cursor: Cursor) -> Wait[str]:
    quote = yield from cursor.expect('"""', "'''", '"', "'")
    if quote in ('"', "'") and (yield from cursor.at([quote])):
        cursor.take(1)
        return '""'
    chunks: list[str] = []
    markers = Markers([quote, "\\"])
    while (found := (yield from cursor.until(markers, chunks.append))) == "\\":
        chunks.append((yield from cursor.peek(2)))
        cursor.take(2)
    if not found:
        raise cursor.unreadable()
    cursor.take(len(quote))
    return json_string(decoded_escapes("".join(chunks)))


def as_json(text: str, dialect: Dialect = JSON) -> str | None:
    """A whole text as JSON, or None where it is not one value."""
    return complete(lambda cursor: read_value(cursor, dialect), text)


_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}:,]|[^][{}:,"\s]+')


def parts(text: str) -> list[tuple[str, str]]:
    """The members of a JSON object as key and raw value, or a list's items under empty keys.

    The text must be JSON already, as `read_value` gives it.
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
    """The text that a JSON string stands for; None for any other value."""
    if not text.startswith('"'):
        return None
    decoded: str = json.loads(text)
    return decoded
