"""Gemma 4 and FunctionGemma: `call:NAME{key:value,…}`, like JSON but without quotes."""

from __future__ import annotations

import re
from dataclasses import replace

from common.formats.answer import Call
from common.formats.cursor import SPACE, Wait
from common.formats.json_calls import read_arguments, read_json_calls
from common.formats.pythonic import at_named_call, read_pythonic
from common.formats.reading import CallSyntax, Reading, begins_line
from common.formats.tag_spelling import closings, openings
from common.formats.values import GEMMA4, Dialect

_NAME = re.compile(r"[\w.:/-]*")
_AROUND_NAME = ('"', "'", "`", "<|channel|>commentary", "<|channel|>")
_GEMMA4_OPENERS = ("<|tool_call>", "<tool_call>", "<|tool_call|>", "<call>", "<|tool_calls>")
_HALF_OPENERS = ("tool_call>", "|tool_call>", "<|tool_call")
_GEMMA4_CLOSERS = (
    "<tool_call|>",
    "</tool_call>",
    "<|/tool_call|>",
    "<|tool_call|>",
    "</call>",
    "<tool_calls|>",
    "tool_call|>",
)
"""The tokens, and what the model sometimes writes instead."""


def _read(
    reading: Reading, dialect: Dialect, openers: tuple[str, ...], closers: tuple[str, ...]
) -> Wait[None]:
    marked = bool((yield from reading.accept(*openers)))
    yield from reading.accept(*_HALF_OPENERS)
    while True:
        yield from reading.space()
        if marked and (yield from _read_other_forms(reading, closers)):
            return
        word = yield from reading.accept("call:", ":call:", ":", "call=", "call ")
        yield from reading.space()
        around = ("", *_AROUND_NAME, dialect.fence, *openers)
        _, written, *_ = yield from reading.accept_all(around, _NAME, around, SPACE)
        name = reading.tools.meant(written)
        if not name or not ((marked and word) or name in reading.tools):
            raise reading.unreadable()
        if (yield from reading.at(closers)) and reading.tools.takes_nothing(name):
            reading.call(Call(name, "{}"))
        elif (yield from reading.peek()) == "{":
            reading.begin(name)
            arguments = yield from read_arguments(reading, closers, dialect, typed=name)
            reading.call(Call(name, arguments))
        else:
            raise reading.unreadable()
        another = yield from reading.follow(SPACE, "call:")
        if not another:
            yield from reading.accept_all(SPACE, closers)
            return


def _read_other_forms(reading: Reading, closers: tuple[str, ...]) -> Wait[bool]:
    """Read calls that are JSON or Python's between the markers; returns whether they are."""
    python = yield from reading.follow(("call:", ""), _NAME, "(")
    if python and reading.offered and not (yield from at_named_call(reading)):
        python = ()
    if (yield from reading.at(["{", "["])):
        yield from read_json_calls(reading, closers)
    elif python:
        reading.take(len(python[0]))
        yield from read_pythonic(reading, closers, offered=False)
    else:
        return False
    yield from reading.accept_after_space(*closers)
    return True


def _fenced(fence: str, openers: tuple[str, ...], closers: tuple[str, ...]) -> CallSyntax:
    dialect = replace(GEMMA4, fence=fence)

    def read(reading: Reading) -> Wait[None]:
        yield from _read(reading, dialect, openers, closers)

    return CallSyntax(openers, read, closers[:1])


def fenced_calls(opener: str, fence: str, closer: str) -> CallSyntax:
    """Return the syntax of calls with such strings, without the mistakes of Gemma's models."""
    return replace(_fenced(fence, openings(opener), closings(closer)), openers=(opener,))


_MARKED = _fenced(GEMMA4.fence, _GEMMA4_OPENERS, _GEMMA4_CLOSERS)
GEMMA4_CALLS = (
    _MARKED,
    CallSyntax(("call:", *_HALF_OPENERS), _MARKED.read, begins=begins_line, by_name=True),
)
