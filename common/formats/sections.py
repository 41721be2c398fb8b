"""Calls in a marked section, each between its own markers: DeepSeek V3, V3.1 and Kimi K2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.formats.answer import Call
from common.formats.cursor import Cut, Markers, Wait
from common.formats.reading import CallSyntax, Reading


def _nothing(_text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Section:
    """The markers, and how the text between the markers of one call is parsed."""

    opener: str
    closer: str
    call: str
    call_close: str
    read_call: Callable[[Reading], Wait[Call]]
    unmarked: tuple[str, ...] = ()
    """Texts with which a call begins if its marker is missing; () if the marker is required."""

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.opener, self.call)

    @property
    def closers(self) -> tuple[str, ...]:
        return (self.closer, self.call_close)

    @property
    def syntax(self) -> CallSyntax:
        return CallSyntax(self.openers, self.read, self.closers)

    def read(self, reading: Reading) -> Wait[None]:
        """Read a section, or calls whose section marker is missing; an empty section is dropped."""
        cursor = reading.cursor
        in_section = bool((yield from cursor.accept(self.opener)))
        count = 0
        while True:
            with cursor.ahead():
                space = len((yield from cursor.space()))
                following = yield from cursor.at([self.call, self.closer])
                inside = in_section and not following and (yield from cursor.more())
            noise = (yield from self._before_call(reading)) if inside else None
            if noise is not None:
                cursor.take(noise)
            elif following == self.call:
                cursor.take(space + len(following))
            else:
                break
            while (yield from cursor.accept(self.call)):
                pass  # a marker that was written twice
            call = yield from self.read_call(reading)
            yield from self._close_call(reading)
            reading.call(call)
            count += 1
        if following:
            cursor.take(space + len(following))
            reading.settle()
        elif not count:
            raise cursor.unreadable()

    def _before_call(self, reading: Reading) -> Wait[int | None]:
        """The length of the text before the next call, and of the call's marker; 0 if its marker is
        missing, None if no call follows.

        Templates write no text there, and other parsers of these families do not show it.
        """
        cursor = reading.cursor
        start = cursor.position
        with cursor.ahead():
            ends = Markers([self.call, self.closer, self.call_close, *self.unmarked])
            marker = yield from cursor.until(ends, _nothing)
            length = cursor.position + len(marker) - start
        if not marker and self.unmarked and reading.was_cut():
            raise Cut
        return length if marker == self.call else 0 if marker in self.unmarked else None

    def _close_call(self, reading: Reading) -> Wait[None]:
        """Read a call's closing marker, which may be missing if the next text implies it."""
        cursor = reading.cursor
        markers = (self.call_close, self.call, self.closer)
        yield from cursor.accept_after_space("```")
        yield from cursor.drop_cut(markers)
        with cursor.ahead():
            space = len((yield from cursor.space()))
            if not (yield from cursor.more()):
                return
            found = yield from cursor.at(markers)
        if not found:
            raise cursor.unreadable()
        cursor.take(space + (len(found) if found == self.call_close else 0))
