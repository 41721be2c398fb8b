"""The state of a grammar while it parses one answer, and the declarations of a family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from common.formats.answer import Answer, Call
from common.formats.cursor import Cursor, Cut, Markers, Unreadable, Wait
from common.formats.tool_schema import ToolSchemas, unwrapped, wraps

CLOSING_QUOTES = "`'\"”’»"
FinishReason = Literal["stop", "length"]


@dataclass(eq=False)
class Reading(Cursor):
    """The text of one answer, and the state of parsing it.

    pending_calls: calls that may still turn out to be quotations.
    begun: whether the current call names an offered tool in the family's own syntax, so that only a
        mistake of the model can make it text.
    offered: whether only calls of offered tools count here.
    opener_is_text: whether a marker that opens calls was output as text.
    broken: whether a malformed call has begun in the text.
    closing: the marker that closes the reasoning opened last.
    wrapped: whether the answer is inside an element, as in `<answer>…</answer>`.
    aliases: the keys of the format's JSON objects, and the usual keys that they stand for.
    keyed: whether the name of a tool is the key of the arguments in the format's JSON objects.
    """

    answer: Answer
    tools: ToolSchemas
    prompt_tail: str
    reason: FinishReason = "length"
    pending_calls: list[Call] | None = None
    opener: str = ""
    begun: bool = False
    offered: bool = False
    opener_is_text: bool = False
    broken: bool = False
    closing: str = ""
    wrapped: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    keyed: bool = False
    reread: int = 0
    _name: str = ""
    _unsent: str | None = ""
    _progress: int = 0
    _failed: int = -1

    def __post_init__(self) -> None:
        Cursor.__init__(self)

    def begin(self, name: str, identity: str = "") -> None:
        """Begin a call of this name; the following `send` calls add its arguments.

        Text of a failed attempt is read again, and is not sent as a call a second time.
        """
        self._name, self._unsent = self.tools.meant(name), ""
        name = self._name
        if name not in self.tools or self.position <= self._failed:
            return
        self.begun = True
        if self.pending_calls is None:
            self.answer.begin(name, identity)

    def send(self, text: str) -> None:
        """Add to the arguments of the open call, if there is one.

        They are sent from their first key on, and only when they are complete if that key may be
        the one of an object around them.
        """
        if self._unsent is not None:
            text = self._unsent = self._unsent + text
            if wraps(self.tools, self._name, text) is not False:
                return
            self._unsent = None
        self.answer.send(text)

    def call(self, call: Call) -> None:
        """Complete a call; the text up to here cannot be put back any more."""
        self.begun = False
        name = self.tools.meant(call.name)
        call = Call(name, unwrapped(self.tools, name, call.arguments), call.id)
        if self.offered and call.name not in self.tools:
            raise Unreadable
        if self.pending_calls is not None:
            self.pending_calls.append(call)
            return
        self.answer.call(call)
        self.settle()

    def settle(self) -> None:
        """Discard the text before this position; it cannot be put back any more."""
        if self.pending_calls is None:
            self.forget()
            self._progress = self.position

    def worth_trying(self) -> bool:
        """Return whether the budget that keeps parsing time linear allows another attempt."""
        return self.reread <= 2 * self.position + 65536

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Read something that may turn out to be text, which is then read again as text.

        Raises Cut if everything up to the length limit could be read.
        """
        waits = not self.ended
        self.save()
        self._progress = -1
        self.begun = False
        try:
            yield
        except Unreadable as error:
            start = self.position
            self.restore(0)
            self.reread += start - self.position
            self._failed = max(self._failed, start)
            self.answer.abandon(cut=self.was_cut())
            if waits and self.was_cut():
                raise Cut from error
            raise
        finally:
            self.release()

    @property
    def settled(self) -> bool:
        """Whether the latest attempt found a call before it failed."""
        return self._progress >= 0

    def was_cut(self) -> bool:
        """Return whether the text was truncated here by the length limit."""
        return self.ended and self.reason == "length"

    def write(self, text: str, markers: Markers) -> None:
        """Output text, without the beginning of a marker that the length limit cut off."""
        end = len(text)
        if self.over and self.was_cut() and not self.answer.markdown.quoted:
            end = markers.open_end(text)
        if len(text) - end > 1:
            self.answer.write(text[:end])
            self.answer.edge()
        else:
            self.answer.write(text)


@dataclass(frozen=True, slots=True)
class Tags:
    """The markers that open and close a family's reasoning."""

    opening: str
    closing: str
    anywhere: bool = False
    """The opening tag is a dedicated token, which is never written by accident."""


def always(_reading: Reading, _opener: str) -> bool:
    return True


def is_quoted(reading: Reading, marker: str) -> Wait[bool]:
    """Return whether the closing marker that comes next is only quoted.

    Mistaking a real end for a quotation would hide everything after it, so both sides must show it:
    there are quotation marks around it, or it is in a code block that ends right after it.
    """
    answer = reading.answer
    behind = yield from reading.peek(len(marker) + 1)
    if answer.quotes and behind[-1] in CLOSING_QUOTES:
        return True
    if not answer.markdown.fenced:
        return False
    with reading.ahead():
        reading.take(len(marker))
        yield from reading.space()
        return bool((yield from reading.at(["```", "~~~"])))


def no_content_yet(reading: Reading, _opener: str) -> bool:
    """Return whether no content came after the last block: only there may unmarked calls begin."""
    return reading.answer.fresh and not reading.answer.reasoning


def own_line(reading: Reading, _opener: str) -> bool:
    """Return whether only blanks come before this position on its line."""
    return reading.answer.markdown.line_start


def begins_line(reading: Reading, _opener: str) -> bool:
    """Return whether only blanks come before this position on its line, outside reasoning."""
    return reading.answer.markdown.line_start and not reading.answer.reasoning


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The texts that open a call, and how the call after one is parsed."""

    openers: tuple[str, ...]
    read: Callable[[Reading], Wait[None]]
    """Starts at the opener, `Reading.opener`; passes each call to `Reading.call`."""
    closers: tuple[str, ...] = field(default=())
    """Closing markers; one that follows a call on its own is dropped."""
    begins: Callable[[Reading, str], bool] = always
    """Whether an opener counts at its position, judging by the text before it."""
    by_name: bool = False
    """Tool names are openers too, because models sometimes omit the marker before them."""
    broken: bool = False
    """The openers lack a bracket, so that they are no markers of the family."""
    foreign: bool = False
    """Another family's calls, or calls without markers: they count only if the tools were offered,
    and if they begin a line or end the answer.
    """
    last: bool = False
    """Calls that look like ordinary text: they count only if they end the answer."""

    @property
    def marked(self) -> bool:
        """Whether its opening texts are markup that does not occur in ordinary text."""
        words = any(opener.isalnum() for opener in self.openers)
        return self.begins is always and not self.foreign and not words
