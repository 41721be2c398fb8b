"""gpt-oss: messages with headers that say on which channel, and to whom, each one speaks.

The reply begins inside a header that the prompt opened, and ends without the token that stopped
it. Analysis is reasoning, a message to `functions.NAME` is a call, all else is the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.formats.answer import Call
from common.formats.cursor import Cut, Markers, Unreadable, Wait
from common.formats.json_calls import arguments_of
from common.formats.reading import Reading, Tags
from common.formats.values import read_value

_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADER_ENDS = Markers([_MESSAGE, _START, *_ENDS])
_BODY_ENDS = Markers([_START, _CHANNEL, *_ENDS])
_HEADER_PARTS = (_CHANNEL, "<|constrain|>", _MESSAGE, " to=", "to=")
_NEXT = Markers([_START])
_ROLE = re.compile(r"[a-z]*")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_KNOWN_IN_HEADER = re.compile(
    r"<\|channel\|>\s*(?:analysis|commentary|final)\b|<\|constrain\|>\s*[a-z]*|to=[^\s<]+"
    r"|\b(?:assistant|json|code)\b"
)
_CUT_HEADER = re.compile(r"\s*<\|[a-z<|>]{0,80}")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


@dataclass(frozen=True)
class Harmony:
    """The grammar; its markers are the same for all models that write it."""

    tags: tuple[Tags, ...] = (Tags("<|channel|>analysis<|message|>", "<|end|>", anywhere=True),)
    openers: tuple[str, ...] = ("<|channel|>commentary to=functions.",)
    closers: tuple[str, ...] = ("<|call|>",)

    def read(self, reading: Reading) -> Wait[None]:
        header = reading.prompt_tail.rpartition(_START)[2]
        if _MESSAGE in header:
            yield from self._body(reading, header.partition(_MESSAGE)[0])
            header = ""
        while (yield from reading.cursor.more()):
            yield from self._message(reading, header)
            header = ""

    def _message(self, reading: Reading, prompted: str) -> Wait[None]:
        cursor, answer = reading.cursor, reading.answer
        header = ""
        try:
            with reading.attempt():
                header = prompted + (yield from self._header(reading))
                if recipient := _RECIPIENT.search(header):
                    yield from self._call(reading, recipient[1])
        except Cut:
            rest = cursor.rest()
            if not _CUT_HEADER.fullmatch(rest):
                answer.exact(reasoning=False)
                answer.write(rest)
        except Unreadable:
            yield from self._other(reading)
        else:
            if not recipient:
                yield from self._body(reading, header)

    def _header(self, reading: Reading) -> Wait[str]:
        """What stands between the start of a message and its text."""
        cursor = reading.cursor
        chunks: list[str] = []
        with cursor.ahead():
            yield from cursor.space()
            spaced = bool((yield from cursor.at([_START, _CHANNEL])))
        if spaced:
            yield from cursor.space()
        if (yield from cursor.accept(_START)):
            chunks.append((yield from cursor.run(_ROLE)))
        if not (yield from cursor.at(_HEADER_PARTS)):
            raise cursor.unreadable()
        yield from cursor.until(_HEADER_ENDS, chunks.append)
        yield from cursor.expect(_MESSAGE)
        header = "".join(chunks)
        if _KNOWN_IN_HEADER.sub("", header).strip():
            raise Unreadable
        return header

    def _call(self, reading: Reading, recipient: str) -> Wait[None]:
        cursor = reading.cursor
        name = recipient.removeprefix("functions.")
        if not reading.tools or (name == recipient and name not in reading.tools):
            raise Unreadable
        yield from cursor.space()
        arguments: str | None = "{}"
        over = not (yield from cursor.more()) and not reading.was_cut()
        if not over and not (yield from cursor.at([*_ENDS, _START])):
            arguments = arguments_of((yield from read_value(cursor, ends=(*_ENDS, _START))))
        if arguments is None:
            raise Unreadable
        yield from cursor.space()
        closed = yield from cursor.accept(*_ENDS)
        if not closed and (yield from cursor.more()) and not (yield from cursor.at([_START])):
            raise Unreadable
        reading.call(Call(name, arguments))

    def _body(self, reading: Reading, header: str) -> Wait[None]:
        """The text of a message that is no call."""
        cursor, answer = reading.cursor, reading.answer
        answer.exact(reasoning=bool(_ANALYSIS.search(header)))
        while marker := (yield from cursor.until(_BODY_ENDS, answer.write)):
            if answer.markdown.quoted:
                answer.write(cursor.take(len(marker)))
                continue
            cursor.take(len(marker) if marker in _ENDS else 0)
            break
        answer.flush()

    def _other(self, reading: Reading) -> Wait[None]:
        """Text without a header is the answer; a call that cannot be read is kept as written."""
        cursor, answer = reading.cursor, reading.answer
        if not (yield from cursor.at([_START, *_HEADER_PARTS])):
            yield from self._body(reading, "")
            return
        answer.exact(reasoning=False)
        answer.write((yield from cursor.accept(_START)))
        yield from cursor.until(_NEXT, answer.write)
        answer.flush()
