"""Reads string literals of JSON and Python, and Python source, whose literals may hide delimiters.

The content of a literal is passed on as that of a JSON string.
"""

from __future__ import annotations

import codecs
import re

from common.formats.cursor import BRACKETS, END_TOKENS, SPACE, WORD, Cursor, Wait, markers_of
from common.formats.json_text import Send, escaped

_AFTER_LITERAL = ("", ",", ":", ")", "]", "}", "<", "`")
_QUOTES = ('"""', "'''", '"', "'")
_SQUARE_RUN, _ROUND_RUN = re.compile(r"[\]}]*"), re.compile(r"\)*")
_SOURCE_RUN = re.compile(r"[^,:()\[\]{}<`'\"\n]*")
_LITERAL_BEGINS = re.compile(r"(?:^|\W)[bBfFrRuU]{0,2}\Z")
_AFTER_INNER_QUOTE = frozenset("_).!?'-+*/=(;\\^$@&|~%#>")
_BEHIND_COMMA = frozenset("'“{}],/-")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"""\\(?:x{_HEX}{{2}}|u{_HEX}{{4}}|U00(?:0{_HEX}|10){_HEX}{{4}}|[0-7]{{1,3}}|[\n\\'"abfnrtv])"""
)
_JSON_ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|u{_HEX}{{4}})')
_CUT_ESCAPE = re.compile(rf"\\(?:u{_HEX}*)?")
_LENGTHS = {"x": 4, "u": 6, "U": 10, **dict.fromkeys("01234567", 4)}


def _is_inner_quote(cursor: Cursor, inside: str, ends: tuple[str, ...], opened: bool) -> Wait[bool]:
    """Return whether the quote that comes next is a part of a string whose end comes later.

    Raises Cut if the text may have been cut inside the string.

    inside: the bracket around the string if it is a value or an item.
    opened: whether an inner quote has come that this one may close.
    """
    with cursor.ahead():
        cursor.take(1)
        space = yield from cursor.space()
        head = yield from cursor.peek()
        inner = head.isalnum() or head in _AFTER_INNER_QUOTE
        inner = inner and not ("\n" in space and (yield from cursor.at(["--"])))
        if opened and inside and not inner and "\n" not in space:
            inner = not (yield from _may_follow_value(cursor, inside, ends, space))
        if inner:
            yield from cursor.until(markers_of('"'), lambda _text: None)
        if (yield from cursor.more()):
            return inner
        if cursor.stopped:
            return False
        raise cursor.unreadable()


def _may_follow_value(cursor: Cursor, inside: str, ends: tuple[str, ...], space: str) -> Wait[bool]:
    """Return whether what comes next can follow a string in these brackets, behind this space."""
    head = yield from cursor.peek()
    if head in ("", "/", "`") or (yield from cursor.at([*ends, *END_TOKENS])):
        return True
    if head == '"':  # of the next key, if the comma is missing
        return bool(space)
    if head == ",":
        cursor.take(1)
        yield from cursor.space()
        return inside != "{" or (yield from _at_member(cursor))
    if head not in ("}", "]"):
        return False
    yield from cursor.run(BRACKETS)
    return (yield from cursor.peek()) != '"' or (yield from _at_member(cursor))


def _at_member(cursor: Cursor) -> Wait[bool]:
    """Return whether a member of an object comes next, or what else models write behind a comma."""
    head = yield from cursor.peek()
    with cursor.ahead():
        if head == '"':
            yield from read_quoted(cursor, lambda _text: None)
        else:
            yield from cursor.run(WORD)
        yield from cursor.accept_all(('"', ""), SPACE)
        ended = not (yield from cursor.more())
        return ended or bool((yield from cursor.at([":", "="]))) or head in _BEHIND_COMMA


def read_quoted(
    cursor: Cursor,
    add: Send,
    loose: bool = False,
    inside: str = "",
    ends: tuple[str, ...] = (),
) -> Wait[None]:
    """Read a JSON string. `loose`: quotes inside it may not be escaped."""
    add(cursor.take(1))
    opened = False
    while True:
        yield from cursor.run(_STRING_RUN, add)
        head = yield from cursor.peek()
        if head == "\\":
            add((yield from _read_escape(cursor)))
        elif not head:
            raise cursor.unreadable()
        elif head != '"':
            add(escaped(cursor.take(1)))
        elif loose and (yield from _is_inner_quote(cursor, inside, ends, opened)):
            add(escaped(cursor.take(1)))
            opened = not opened
        else:
            add(cursor.take(1))
            return


def _read_escape(cursor: Cursor) -> Wait[str]:
    """Return an escape unchanged, or as two literal characters if it is not valid in JSON."""
    length = 6 if (yield from cursor.peek(2))[1:] == "u" else 2
    whole = yield from cursor.peek(length)
    if _JSON_ESCAPE.fullmatch(whole):
        return cursor.take(length)
    if len(whole) < length and _CUT_ESCAPE.fullmatch(whole):
        cursor.rest()
        raise cursor.unreadable()
    cursor.take(1)
    return "\\\\"


def read_literals(cursor: Cursor, add: Send) -> Wait[str]:
    """Read string literals that follow each other, which Python reads as one.

    Returns the last quote.
    """
    space, quote = 0, ""
    while space >= 0:
        cursor.take(space)
        quote = yield from read_literal(cursor, add, source=True)
        with cursor.ahead():
            space = len((yield from cursor.space()))
            if not (yield from cursor.more()) and not cursor.stopped:
                raise cursor.unreadable()
            if not (yield from at_literal(cursor)):
                space = -1
    return quote


def at_literal(cursor: Cursor) -> Wait[bool]:
    """Return whether a string literal comes next, perhaps a raw one."""
    head = yield from cursor.peek()
    if head in ("r", "R"):
        return (yield from cursor.peek(2))[1:] in ("'", '"', "")
    return head in ("'", '"')


def read_literal(cursor: Cursor, add: Send, source: bool = False) -> Wait[str]:
    """Read a string literal; its content is passed on as that of a JSON string.

    A quote after which neither a delimiter nor another literal comes is part of the content.
    source: the literal may be a part of an expression. Returns its quote.
    """
    raw = yield from cursor.accept("r", "R")
    quote = yield from cursor.expect(*_QUOTES, "“")
    if quote == "“":
        raw, quote = quote, "”"
    if quote in ('"', "'") and (yield from cursor.accept(quote)):
        return quote
    markers = markers_of(quote, "\\")
    while True:
        marker = yield from cursor.inside(markers, lambda text: add(escaped(text)))
        if marker == quote:
            with cursor.ahead():
                cursor.take(len(quote))
                yield from cursor.space()
                head = yield from cursor.peek()
                ends = len(quote) > 1 or head in _AFTER_LITERAL or (yield from at_literal(cursor))
                if source and len(quote) == 1:
                    ends = yield from _ends_in_source(cursor, quote, ends)
            text = cursor.take(len(quote))
            if ends:
                return quote
            add(escaped(text))
        elif raw:
            yield from cursor.peek(2)
            add(escaped(cursor.take(2)))
        else:
            add(escaped((yield from _decode_escape(cursor))))


def _decode_escape(cursor: Cursor) -> Wait[str]:
    """Decode the next escape; one that Python does not know is left unchanged."""
    pair = yield from cursor.peek(2)
    length = _LENGTHS.get(pair[1:], 2)
    whole = yield from cursor.peek(length)
    if len(whole) < 2 or (len(whole) < length and (whole[2:].isalnum() or len(whole) == 2)):
        cursor.rest()
        raise cursor.unreadable()
    escape = _ESCAPE.match(whole)
    text = cursor.take(escape.end() if escape else 2)
    return codecs.decode(text, "unicode_escape") if escape else text


def _ends_in_source(cursor: Cursor, quote: str, delimited: bool) -> Wait[bool]:
    """Return whether a quote that was read, and the space after it, ends its literal.

    A quote that other code in the string has, as in `"print("a")"`, has a bracket and then a quote
    after it. An operator or a method ends the literal, and so does the lack of another quote.
    """
    if not (yield from cursor.more()):
        if cursor.stopped:
            return True
        raise cursor.unreadable()
    if delimited:
        brackets = (yield from cursor.run(_SQUARE_RUN)) + (yield from cursor.run(_ROUND_RUN))
        return not (brackets and (yield from cursor.at([quote])))
    operator = yield from cursor.accept(".", "+", "%", "*", "[")
    if operator == ".":
        operator = yield from cursor.run(WORD)
        operator = operator and (yield from cursor.accept("("))
    return bool(operator) or not (yield from cursor.until(markers_of(quote), lambda _text: None))


def read_source(
    cursor: Cursor, ends: tuple[str, ...] = (), stops: tuple[str, ...] = (",",)
) -> Wait[str]:
    """Python source up to a stop or closing bracket outside all its brackets, or one of the ends.

    Raises Cut if the text was cut.
    """
    chunks: list[str] = []
    depth = 0
    while True:
        chunks.append((yield from cursor.run(_SOURCE_RUN)))
        if not (yield from cursor.more()):
            if cursor.stopped and not depth:
                return "".join(chunks)
            raise cursor.unreadable()
        head = yield from cursor.peek()
        over = head in stops or head in (")", "]", "}")
        if (over and not depth) or (yield from cursor.at(ends)):
            return "".join(chunks)
        depth += (head in ("(", "[", "{")) - (head in (")", "]", "}"))
        if head in ("'", '"') and _LITERAL_BEGINS.search("".join(chunks[-6:])[-3:]):
            yield from _read_literal_source(cursor, chunks.append)
        else:
            chunks.append(cursor.take(1))


def _read_literal_source(cursor: Cursor, add: Send) -> Wait[None]:
    """Read a string literal, which ends at the latest with its line if its quote is single."""
    quote = yield from cursor.expect(*_QUOTES)
    add(quote)
    markers = markers_of(quote, "\\", "\n" if len(quote) == 1 else "")
    while (marker := (yield from cursor.inside(markers, add))) != "\n":
        add(cursor.take(len(marker)))
        if marker == quote:
            return
        add(cursor.take(len((yield from cursor.peek()))))
