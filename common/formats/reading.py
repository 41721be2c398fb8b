"""What a grammar works with while it reads one answer, and how a family says what it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from common.formats.answer import Answer, Call
from common.formats.cursor import Cursor, Cut, Unreadable, Wait
from common.tool_schema import ToolSchemas

_CLOSING_QUOTES = "`'\"”’»"
FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class Reading:
    """One answer being read.

    partial: calls are shown while they are written. pending_calls: those that may still turn out
    to be quotations. begun: the call that is being read names an offered tool in the family's own
    syntax, so that nothing but a mistake of the model can keep it from being one. closing: what
    closes the reasoning that was opened last.
    """

    cursor: Cursor
    answer: Answer
    tools: ToolSchemas
    prompt_tail: str
    partial: bool = False
    reason: FinishReason = "length"
    pending_calls: list[Call] | None = None
    opener: str = ""
    begun: bool = False
    closing: str = ""
    reread: int = 0
    _progress: int = 0
    _failed: int = -1

    def begin(self, name: str, identity: str = "") -> None:
        """A call of this name has begun; what `tell` gets from here on are its arguments.

        Text that an attempt has failed on is read a second time, and not shown as a call again.
        """
        if name not in self.tools or self.cursor.position <= self._failed:
            return
        self.begun = True
        if self.partial and self.pending_calls is None:
            self.answer.begin(name, identity)

    def tell(self, text: str) -> None:
        """The next piece of the arguments of the call that has begun, if one has."""
        self.answer.tell(text)

    def call(self, call: Call) -> None:
        """A call is complete, so what was read up to here will not be put back."""
        self.begun = False
        if self.pending_calls is not None:
            self.pending_calls.append(call)
            return
        self.answer.call(call)
        self.settle()

    def settle(self) -> None:
        """Nothing before this place is put back any more."""
        if self.pending_calls is None:
            self.cursor.forget()
            self._progress = self.cursor.position

    def worth_trying(self) -> bool:
        """Whether another attempt fits the budget that keeps hostile texts linear."""
        return self.reread <= 2 * self.cursor.position + 65536

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Read something that may turn out to be text: then it is put back, unread.

        Raises Cut where it was readable up to the length limit.
        """
        waits = not self.cursor.ended
        self.cursor.save()
        self._progress = -1
        self.begun = False
        try:
            yield
        except Unreadable as error:
            start = self.cursor.position
            self.cursor.restore(0)
            self.reread += start - self.cursor.position
            self._failed = max(self._failed, start)
            self.answer.abandon()
            if waits and self.was_cut():
                raise Cut from error
            raise
        finally:
            self.cursor.release()

    @property
    def settled(self) -> bool:
        """Whether the latest attempt found something before it failed."""
        return self._progress >= 0

    def was_cut(self) -> bool:
        """The text ended here, and not by the model's own decision."""
        return self.cursor.ended and self.reason == "length"


@dataclass(frozen=True, slots=True)
class Tags:
    """What opens and closes a family's reasoning."""

    opening: str
    closing: str
    anywhere: bool = False
    """The opening tag is a token of its own, which nobody writes by accident."""


def always(_reading: Reading, _opener: str) -> bool:
    return True


def is_quoted(reading: Reading, marker: str) -> Wait[bool]:
    """Whether a marker that ends a block, and comes next, is only being talked about.

    Taking a real end for a quotation would hide all that follows, so both sides must show it:
    quotation marks around it, or a code block that goes on or ends behind it.
    """
    answer, cursor = reading.answer, reading.cursor
    behind = yield from cursor.peek(len(marker) + 1)
    if answer.quotes and behind[-1] in _CLOSING_QUOTES:
        return True
    if not answer.markdown.fenced:
        return False
    with cursor.ahead():
        cursor.take(len(marker))
        yield from cursor.space()
        return bool((yield from cursor.at(["```", "~~~"])))


def nothing_said(reading: Reading, _opener: str) -> bool:
    """What begins like ordinary text counts at the beginning of an answer, and nowhere else."""
    return reading.answer.fresh and not reading.answer.reasoning


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """What may open calls, and how they are read once an opener has come."""

    openers: tuple[str, ...]
    read: Callable[[Reading], Wait[None]]
    """Starts at the opener, which `Reading.opener` names; hands each call to `Reading.call`."""
    closers: tuple[str, ...] = field(default=())
    """What closes calls: left out where it stands alone after one."""
    begins: Callable[[Reading, str], bool] = always
    """Whether an opener counts where it stands, as far as that can be told from before."""
    by_name: bool = False
    """The names of the tools are openers too: models leave out what should stand before them."""

    @property
    def marked(self) -> bool:
        """Its openers are markup, and not what ordinary text may hold too."""
        return self.begins is always and not any(opener[0].isalnum() for opener in self.openers)
