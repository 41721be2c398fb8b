"""A position in a text that is still arriving, and the operations that grammars are written with.

A grammar is a generator that reads as if the whole text were available. If a decision needs
characters that have not arrived, it yields, and is resumed when they have. Decisions depend only on
characters, never on where a piece ended, so every split of a text gives the same result. Text that
was read is discarded, except after `save`: then it can be put back if it turns out to be something
else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A grammar that returns a T and yields whenever it needs more text."""

Part = str | tuple[str, ...] | re.Pattern[str]
"""A literal, one of several literals, or a repeated character class."""

SPACE, WORD = re.compile(r"[ \t\r\n]*"), re.compile(r"\w*")
KEY, BRACKETS = re.compile(r"[\w$-]+"), re.compile(r"[}\]\s]*")
"""Keys without quotes, and what closes objects and lists."""
_SURPLUS = re.compile(r"[})\]\s]*")
STRUCK_END = "</s>"
END_TOKENS = (
    *(STRUCK_END, "<eos>", "[EOS]", "<turn|>", "<end_of_turn>", "[e~[", "<seed:eos>"),
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>"),
    *("<|eom|>", "<|end|>", "<|end_of_turn|>", "<|endofturn|>", "[|endofturn|]", "<|EOT|>"),
    *("<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<|eos|>", "<|hy_eos|>", "<|im:end|>"),
    *("<|user|>", "<|observation|>", "<|assistant_end|>", "<|endofresponse|>", "<SPECIAL_12>"),
    *("</longcat_s>", "[unused10]", "<|end_of_msg|>", "<|endofassistant|>", "<|flush|>"),
)
"""Tokens that end a turn. A checkpoint that does not name them as special shows them as text."""


class Unreadable(Exception):
    """The text does not follow the syntax with which it begins."""


class Cut(Unreadable):
    """The text ended in the middle of something."""


class Markers:
    """Literals to search for in a text that may end in the middle of one."""

    def __init__(self, literals: Iterable[str]) -> None:
        self.literals = tuple(sorted({text for text in literals if text}, key=len, reverse=True))
        self._any = re.compile("|".join(map(re.escape, self.literals)) or r"(?!)")
        self._beginnings = {text[:end] for text in self.literals for end in range(1, len(text))}
        self._longest = max(map(len, self.literals), default=0)
        self._first = re.compile("|".join({re.escape(text[0]) for text in self.literals}) or "(?!)")

    def find(self, text: str, at: int, ended: bool) -> tuple[int, str]:
        """Return the end of the plain text, and the marker there; '' if it is incomplete."""
        if match := self._any.search(text, at):
            start, begun = match.start(), self.open_end(text, at)
            if begun < start or (begun == start and not ended):  # perhaps of a longer marker
                return (len(text) if ended else begun), ""
            return start, match.group()
        return (len(text) if ended else self.open_end(text, at)), ""

    def at(self, text: str, at: int, ended: bool) -> str | None:
        """Return the longest marker at this offset; '' if none is there.

        None if text that has not arrived decides.
        """
        if not ended and len(text) - at < self._longest:
            rest = text[at:]
            if not rest or rest in self._beginnings:
                return None
        match = self._any.match(text, at)
        return match.group() if match else ""

    def may_begin(self, text: str) -> bool:
        """Return whether the text has the first character of a marker."""
        return self._first.search(text) is not None

    def open_end(self, text: str, at: int = 0) -> int:
        """Return the first offset from which the text is the beginning of a marker."""
        at = max(at, len(text) - self._longest + 1)
        while match := self._first.search(text, at):
            at = match.start()
            if text[at:] in self._beginnings:
                return at
            at += 1
        return len(text)


@lru_cache(maxsize=1024)
def markers_of(*literals: str) -> Markers:
    """Return the Markers of these literals.

    The latest are stored, because most answers have the same tools as the one before, and their
    patterns take longer to compile than a short answer takes to read.
    """
    return Markers(literals)


class Cursor:
    """The text that has arrived and not been read.

    ended: whether no more text will come.
    stopped: whether the model itself ended the text.
    """

    __slots__ = ("_at", "_base", "_floor", "_kept", "_saves", "_text", "ended", "stopped")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._base = 0  # the position of the beginning of _text
        self._kept: list[str] = []  # what comes before _text and can be put back
        self._floor = 0  # the first position that can be restored
        self._saves = 0
        self.ended = False
        self.stopped = False

    @property
    def position(self) -> int:
        """The number of characters that were read."""
        return self._base + self._at

    @property
    def pending(self) -> str:
        """Text that has arrived and was not read, or can be put back."""
        start = max(self._floor - self._base, 0) if self._saves else self._at
        return "".join(self._kept) + self._text[start:]

    @property
    def over(self) -> bool:
        """Whether all of the text has been read."""
        return self.ended and self._at == len(self._text)

    def feed(self, text: str) -> None:
        if self._saves:
            self._kept.append(self._text[max(self._floor - self._base, 0) : self._at])
        self._base = self.position
        self._text = self._text[self._at :] + text
        self._at = 0

    def take(self, length: int) -> str:
        """Read characters that `peek` or a search has found."""
        chunk = self._text[self._at : self._at + length]
        self._at += len(chunk)
        return chunk

    def save(self) -> int:
        """Remember this position; every save must be released."""
        if not self._saves:
            self._floor = self.position
        self._saves += 1
        return self.position

    def restore(self, position: int) -> None:
        """Put back what was read since this position, or as much of it as was not discarded.

        The text that follows is copied only if some of this came in an earlier piece.
        """
        if position >= self._base and position >= self._floor:  # nearly always
            self._at = position - self._base
            return
        position = max(position, self._floor)
        back: list[str] = []
        while position < self._base:
            back.append(self._kept.pop())
            self._base -= len(back[-1])
        if back:
            self._text = "".join(reversed(back)) + self._text
        self._at = position - self._base

    def forget(self) -> None:
        """Discard what was read so far; only the outermost save may do this."""
        self._kept.clear()
        self._floor = self.position

    def release(self) -> None:
        """Discard the latest saved position."""
        self._saves -= 1
        if not self._saves:
            self._kept.clear()

    def ahead(self) -> _Ahead:
        """Look ahead: everything read inside the `with` block is put back."""
        return _Ahead(self)

    def peek(self, length: int = 1) -> Wait[str]:
        """Return the next characters; fewer at the end of the text."""
        while len(self._text) - self._at < length and not self.ended:
            yield
        return self._text[self._at : self._at + length]

    def more(self) -> Wait[bool]:
        """Return whether any text is left."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._at < len(self._text)

    def at(self, literals: Iterable[str]) -> Wait[str]:
        """Return the longest of the literals that comes next, unread; '' if none does."""
        literals = tuple(literals)
        while (found := self._next(literals)) is None:
            yield
        return found

    def accept(self, *literals: str) -> Wait[str]:
        """Read the longest of the literals that comes next; '' if none does."""
        while (found := self._next(literals)) is None:
            yield
        self._at += len(found)
        return found

    def _next(self, literals: tuple[str, ...]) -> str | None:
        """Return the longest of the literals that comes next, unread; '' if none does.

        None if text that has not arrived decides.
        """
        return markers_of(*literals).at(self._text, self._at, self.ended)

    def accept_all(self, *parts: Part) -> Wait[tuple[str, ...]]:
        """Read these parts one after the other; returns their texts.

        Returns nothing, and reads nothing, if one is missing.
        """
        texts: list[str] = []
        place = self.save()
        try:
            for part in parts:
                if isinstance(part, re.Pattern):
                    text, optional = (yield from self.run(part)), bool(part.match(""))
                else:
                    literals = (part,) if isinstance(part, str) else part
                    while (found := self._next(literals)) is None:
                        yield
                    self._at += len(found)
                    text, optional = found, "" in literals
                if not text and not optional:
                    self.restore(place)
                    return ()
                texts.append(text)
        finally:
            self.release()
        return tuple(texts)

    def follow(self, *parts: Part) -> Wait[tuple[str, ...]]:
        """Return the texts of these parts if they come next, unread; nothing if one is missing."""
        with self.ahead():
            return (yield from self.accept_all(*parts))

    def after_space(self, literals: Iterable[str]) -> Wait[tuple[int, str]]:
        """Return the length of the space and end tokens that come next, and the literal behind.

        The literal is '' if none of them follows.
        """
        literals, start = tuple(literals), self.position
        with self.ahead():
            while True:
                yield from self.space()
                length = self.position - start
                found = yield from self.at(literals)
                if found or not (yield from self.accept(*END_TOKENS)):
                    return length, found

    def accept_after_space(self, *literals: str) -> Wait[str]:
        """Read a literal and the space before it; '' and nothing read if no literal follows."""
        space, found = yield from self.after_space(literals)
        return self.take(space + len(found) if found else 0)

    def expect(self, *literals: str) -> Wait[str]:
        """Read one of the literals, which must come next."""
        found = yield from self.accept(*literals)
        if not found:
            raise self.unreadable()
        return found

    def drop_cut(self, literals: tuple[str, ...]) -> Wait[None]:
        """Read the beginning of a literal, and space before it, if the text ends inside it."""
        if self._next(literals) is not None and not self.ended and not self._at_space():
            return  # nearly always
        with self.ahead() as keep:
            yield from self.space()
            comes = yield from self.at(literals)
            left = self.rest() if self.ended else ""
            if left and not comes and any(literal.startswith(left) for literal in literals):
                keep()

    def drop_surplus(self, ends: tuple[str, ...]) -> Wait[None]:
        """Read closing brackets and space before one of the ends, even cut, or the text's end."""
        with self.ahead():
            surplus = yield from self.run(_SURPLUS)
            yield from self.drop_cut(ends)
            closes = (yield from self.at(ends)) or not (yield from self.more())
        self.take(len(surplus) if closes else 0)

    def is_last(self) -> Wait[bool]:
        """Return whether only space comes before the end of the text."""
        with self.ahead():
            yield from self.space()
            return not (yield from self.more())

    def run(self, pattern: re.Pattern[str], show: Callable[[str], None] | None = None) -> Wait[str]:
        """Read characters as long as the pattern, a repeated character class, matches."""
        chunks: list[str] = []
        while True:
            match = pattern.match(self._text, self._at)
            if match and match.end() > self._at:
                chunks.append(self._text[self._at : match.end()])
                self._at = match.end()
                if show:
                    show(chunks[-1])
            if self._at < len(self._text) or self.ended:
                return chunks[0] if len(chunks) == 1 else "".join(chunks)
            yield

    def _at_space(self) -> bool:
        return self._text[self._at : self._at + 1].isspace()

    def space(self) -> Wait[str]:
        if self._at < len(self._text) and not self._at_space():  # nearly always
            return ""
        return (yield from self.run(SPACE))

    def until(
        self, markers: Markers, show: Callable[[str], None], *, whole: bool = True
    ) -> Wait[str]:
        """Pass text to `show` up to a marker, which is left unread; '' at the end of the text.

        whole: whether the beginning of a marker at the end of the text is passed to `show` too.
        """
        while True:
            end, marker = markers.find(self._text, self._at, self.ended)
            if not (marker or whole):
                end = markers.open_end(self._text, self._at)
            if end > self._at:
                show(self.take(end - self._at))
            if marker or self.ended:
                return marker
            yield

    def inside(self, markers: Markers, show: Callable[[str], None]) -> Wait[str]:
        """Do the same as `until`, for a value that a marker must end. Raises Cut without one."""
        marker = yield from self.until(markers, show, whole=False)
        if not marker:
            self.rest()
            raise Cut
        return marker

    def unreadable(self) -> Unreadable:
        """Return the exception for this position: Cut if the text has ended, else Unreadable."""
        return Cut() if self.over else Unreadable()

    def rest(self) -> str:
        """Read all that has arrived."""
        return self.take(len(self._text) - self._at)


class _Ahead:
    """Puts back what a block reads; `with` yields a function that keeps what was read before it."""

    __slots__ = ("_cursor", "_place")

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor

    def __enter__(self) -> Callable[[], None]:
        self._place = self._cursor.save()
        return self._keep

    def __exit__(self, *_: object) -> None:
        cursor = self._cursor
        cursor.restore(self._place)
        cursor.release()

    def _keep(self) -> None:
        self._place = self._cursor.position


def complete(grammar: Callable[[Cursor], Wait[T]], text: str) -> T | None:
    """Return the grammar's result for a complete text; None if it cannot parse all of it."""
    cursor = Cursor()
    cursor.feed(text)
    cursor.ended = True
    running = grammar(cursor)
    try:
        next(running)
    except StopIteration as end:
        value: T = end.value
        return value if not cursor.rest().strip() else None
    except Unreadable:
        return None
    raise AssertionError("a grammar asks for more text after the end")
