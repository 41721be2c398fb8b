"""Parses strings between delimiters such as Gemma's, which may be wrong or missing.

A string without its last delimiter ends before text that can only follow a value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from common.formats.cursor import BRACKETS, KEY, SPACE, Cursor, Wait, markers_of
from common.formats.json_text import NUMBER, Send, escaped
from common.formats.tag_spelling import openings

_TEXT_RUN = re.compile(r"[^,{}\[\]<]*")
_FARTHEST, _MOST_DELIMITERS = 20_000, 100
"""How far the end of a string is searched whose delimiters are wrong."""
_SCALAR_THEN_KEY = re.compile(rf"\s*(?:{NUMBER.pattern}|[tT]rue|[fF]alse|null|None)(?=\s+\w+:)")
_TEXT_THEN_KEY = re.compile(r".*\S(?=\s+\w+:\s*\Z)", re.S)
KEY_RUN = re.compile(r"[^:=,{}\[\]<\n]*")


@cache
def _text_before(fence: str) -> re.Pattern[str]:
    """Return a pattern for text that neither a fence nor the end of a value begins in."""
    begins = "".join(re.escape(form[0]) for form in openings(fence))
    return re.compile(rf"[^,}}\]{begins}]*")


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a value among brackets, which shows its end if a delimiter is missing.

    depth: how many brackets are open; 0 for an argument of a Python call.
    listed: whether the value is an item of a list.
    free: whether the value is declared as a string.
    keys: the declared members, and whether each may be a string.
    """

    fence: str
    ends: tuple[str, ...]
    depth: int = 1
    listed: bool = False
    free: bool = False
    keys: Mapping[str, bool] = field(default_factory=dict)

    @property
    def fences(self) -> tuple[str, ...]:
        """The fence, also with damaged brackets."""
        return openings(self.fence)

    def ends_call(self, cursor: Cursor) -> Wait[bool]:
        """Return whether the call ends here, or the answer does."""
        return bool((yield from cursor.at(self.ends))) or not (yield from cursor.more())

    def ends_member(self, cursor: Cursor) -> Wait[bool]:
        """Read space and brackets; returns whether what comes next can only follow a value."""
        brackets = (yield from cursor.run(BRACKETS)).strip()
        if not brackets and not (yield from cursor.at(self.ends)):
            yield from _expect_more(cursor, self.ends)
        if (yield from self.ends_call(cursor)):
            return True
        if not (yield from cursor.accept(",")):
            return not brackets and (yield from at_key(cursor))
        yield from cursor.space()
        if brackets or self.listed or (yield from cursor.peek()) in ("}", ","):
            return True
        yield from cursor.accept(self.fence, '"', "'")
        key = (yield from cursor.run(KEY_RUN)).strip().strip("\"'")
        yield from cursor.accept(self.fence)
        known = key in self.keys if self.free else key
        return bool(known) and bool((yield from cursor.at([":", "="])))


def at_key(cursor: Cursor) -> Wait[bool]:
    """Read a word; returns whether it is a key without quotes."""
    word = yield from cursor.run(KEY)
    return bool(word) and bool((yield from cursor.at([":", "="])))


def read_raw(cursor: Cursor, place: Place) -> Wait[str | None]:
    """Read text between single quotes or backticks, which escapes only these; None if no such
    quote ends a value.
    """
    start, text = cursor.position, None
    with cursor.ahead():
        quote = cursor.take(1)
        quotes = markers_of(quote, f"\\{quote}")
        chunks: list[str] = []
        for _ in range(_MOST_DELIMITERS):
            if text is not None or cursor.position - start > _FARTHEST:
                break
            marker = yield from cursor.until(quotes, chunks.append)
            if not marker:
                yield from _expect_more(cursor, ())
                break
            cursor.take(len(marker))
            length = cursor.position - start
            if marker == quote:
                with cursor.ahead():
                    yield from cursor.space()
                    if (yield from cursor.accept(place.fence)):  # a fence of the other notation
                        length = cursor.position - start
                    if (yield from place.ends_member(cursor)):
                        text = "".join(chunks)
            chunks.append(quote)
    cursor.take(0 if text is None else length)
    return text


def read_bare(cursor: Cursor, place: Place) -> Wait[str]:
    """Read text without delimiters up to what ends its member.

    The comma before the next key, and the first of two fences, may be missing. Only text that is
    declared as a string may contain brackets and markup, and may go on to the end of the answer.
    """
    length, fenced = -1, 0
    with cursor.ahead():
        text = ""
        while length < 0:
            text += yield from cursor.run(_TEXT_RUN)
            yield from cursor.drop_cut((place.fence,))
            if not (yield from cursor.more()):
                if not (place.free and cursor.stopped and text.strip()):
                    raise cursor.unreadable()
                length = len(text)
            elif (yield from cursor.at([place.fence])):
                if key := _TEXT_THEN_KEY.match(text):
                    length = key.end()
                    break
                with cursor.ahead():
                    cursor.take(len(place.fence))
                    if not text.strip() or not (yield from place.ends_member(cursor)):
                        raise cursor.unreadable()
                length, fenced = len(text), len(place.fence)
            else:
                head = yield from cursor.peek()
                ends = head != "," and not place.free
                if head == ",":
                    with cursor.ahead():
                        ends = not text.strip() or (yield from place.ends_member(cursor))
                elif place.free:
                    end, skipped = yield from _missing_end(cursor, place)
                    text += cursor.take(skipped if end < 0 else end)
                    ends = end >= 0
                if ends:
                    length = len(text)
                elif head == ",":
                    text += cursor.take(1)
    if not place.free and (key := _SCALAR_THEN_KEY.match(text[:length])):
        length, fenced = key.end(), 0
    text = cursor.take(length)
    cursor.take(fenced)
    if not text.strip() and (yield from cursor.peek()) not in (",", "}", "]"):
        raise cursor.unreadable()
    return text


def read_fenced(cursor: Cursor, place: Place, add: Send) -> Wait[None]:
    """Read a string up to its fence; strings of a call that it quotes are part of it.

    A fence opens a quoted string if a colon, comma or opening bracket comes before it, and neither
    the end of the text nor a colon, comma or closing bracket comes after it. A fence in the middle
    of text is a quotation mark. If no fence ends the string, it ends before the next key that has a
    fence, or before the brackets at the end of the call.
    """
    fence, latest, quoted = place.fence, "", False
    run = _text_before(fence)
    known = -1  # the position up to which the string is known to go on

    def show(text: str) -> None:
        nonlocal latest
        latest = text.rstrip()[-1:] or latest
        add(escaped(text))

    add('"')
    while True:
        yield from cursor.run(run, show)
        if not (yield from cursor.more()):
            raise cursor.unreadable()
        if found := (yield from cursor.at(place.fences)):
            kind = yield from _fence_kind(cursor, place, found, latest, quoted)
            if kind == "end":
                cursor.take(len(found))
                break
            if found == fence:
                cursor.take(len(fence))
                show('"' if kind == "mark" else fence)
                quoted = kind == "opening"
                continue
        length = 1
        if not quoted and cursor.position >= known:
            end, length = yield from _missing_end(cursor, place)
            if end >= 0:
                known = yield from _end_of_fenced(cursor, place, latest)
                if known < 0:
                    show(cursor.take(end))
                    break
        yield from cursor.drop_cut((fence,))
        show(cursor.take(length))
    add('"')


def _fence_kind(cursor: Cursor, place: Place, fence: str, latest: str, quoted: bool) -> Wait[str]:
    """Return what the next fence is.

    The `end` of the string, the `opening` or `closing` of a quoted one, or a quotation `mark`.
    """
    if quoted:
        return "closing"
    with cursor.ahead():
        cursor.take(len(fence))
        yield from cursor.space()
        yield from _expect_more(cursor, ())
        brackets = ("}", "]") if place.depth else (")", "]")
        ends = (yield from cursor.peek()) in ("", ",", ":", *brackets)
        if not ends and latest in (":", ",", "[", "{", "="):
            return "opening"
        if ends or (yield from cursor.at(place.ends)) or (yield from at_key(cursor)):
            return "end"
        yield from _expect_more(cursor, place.ends)
        return "mark"


def _expect_more(cursor: Cursor, literals: tuple[str, ...]) -> Wait[None]:
    """Raise Cut if the length limit cut the text here, or in one of the literals."""
    yield from cursor.drop_cut(literals)
    if not (yield from cursor.more()) and not cursor.stopped:
        raise cursor.unreadable()


def _missing_end(cursor: Cursor, place: Place) -> Wait[tuple[int, int]]:
    """Return whether a string may end here without a fence.

    Returns the length of the text that then still belongs to it, else -1, and of the text that can
    be skipped otherwise.
    """
    with cursor.ahead():
        head = yield from cursor.peek()
        if head == ",":
            yield from cursor.accept_all(",", SPACE)
            key = yield from cursor.run(KEY)
            signed = key and (yield from cursor.accept_all((":", "="), SPACE))
            if signed and (place.keys.get(key) is False or (yield from cursor.at([place.fence]))):
                return 0, 1
            yield from _expect_more(cursor, (place.fence,))
            return -1, 1
        brackets = yield from cursor.run(BRACKETS)
        if not (yield from cursor.at(place.ends)):
            yield from _expect_more(cursor, place.ends)
        if not (yield from place.ends_call(cursor)):
            return -1, max(len(brackets), 1)
    end, left = len(brackets), place.depth
    while left and (last := max(brackets.rfind(b, 0, end) for b in "}]")) >= 0:
        end, left = last, left - 1
    return end, max(len(brackets), 1)


def _end_of_fenced(cursor: Cursor, place: Place, latest: str) -> Wait[int]:
    """Return the position of the fence that ends the string; -1 if there is none nearby."""
    start, quoted = cursor.position, False
    fences = markers_of(place.fence)

    def see(text: str) -> None:
        nonlocal latest
        latest = text.rstrip()[-1:] or latest

    with cursor.ahead():
        for _ in range(_MOST_DELIMITERS):
            if not (yield from cursor.until(fences, see)) or cursor.position - start > _FARTHEST:
                break
            kind = yield from _fence_kind(cursor, place, place.fence, latest, quoted)
            if kind == "end":
                return cursor.position
            see(cursor.take(len(place.fence)))
            quoted = kind == "opening"
    return -1
