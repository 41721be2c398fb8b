"""Gemma 4 and FunctionGemma: `call:NAME{key:value,…}`, like JSON but without quotes."""

from __future__ import annotations

import re

from common.formats.answer import Call
from common.formats.cursor import Wait
from common.formats.json_calls import read_arguments, read_json_calls
from common.formats.pythonic import read_pythonic
from common.formats.reading import CallSyntax, Reading, Tags, begins_line
from common.formats.tagged_text import TaggedText
from common.formats.values import FUNCTION_GEMMA, GEMMA4, Dialect

_NAME = re.compile(r"[\w.:/-]*")
_CALL = "<call>"  # what Gemma 4 sometimes writes instead of its token


def _read(reading: Reading, dialect: Dialect, opener: str, closer: str) -> Wait[None]:
    cursor = reading.cursor
    marked = bool((yield from cursor.accept(opener, _CALL)))
    while True:
        yield from cursor.space()
        if marked and (yield from _read_other_forms(reading, closer)):
            return
        word = yield from cursor.accept("call:", ":call:", ":")
        yield from cursor.space()
        name = yield from cursor.run(_NAME)
        yield from cursor.space()
        if not name or not ((marked and word) or name in reading.tools):
            raise cursor.unreadable()
        if (yield from cursor.at([closer])) and reading.tools.takes_nothing(name):
            reading.call(Call(name, "{}"))
        elif (yield from cursor.peek()) == "{":
            reading.begin(name)
            arguments = yield from read_arguments(
                reading, (closer,), dialect, typed=reading.tools.meant(name)
            )
            reading.call(Call(name, arguments))
        else:
            raise cursor.unreadable()
        with cursor.ahead():
            start = cursor.position
            yield from cursor.space()
            another = yield from cursor.at(["call:"])
            length = cursor.position - start
            closes = yield from cursor.accept(closer)
        cursor.take(length + len(closes) if closes or another else 0)
        if not another:
            return


def _read_other_forms(reading: Reading, closer: str) -> Wait[bool]:
    """Read calls that are JSON or Python's between the markers; returns whether they are."""
    cursor = reading.cursor
    with cursor.ahead():
        is_json = (yield from cursor.peek()) in ("{", "[")
        word = yield from cursor.accept("call:")
        yield from cursor.run(_NAME)
        is_python = (yield from cursor.peek()) == "("
    if is_json:
        yield from read_json_calls(reading, (closer,))
    elif is_python:
        cursor.take(len(word))
        yield from read_pythonic(reading, (closer,), offered=False)
    else:
        return False
    yield from cursor.accept_after_space(closer)
    return True


def _read_gemma4(reading: Reading) -> Wait[None]:
    yield from _read(reading, GEMMA4, "<|tool_call>", "<tool_call|>")


def _read_function_gemma(reading: Reading) -> Wait[None]:
    yield from _read(reading, FUNCTION_GEMMA, "<start_function_call>", "<end_function_call>")


GEMMA4_TEXT = TaggedText(
    tags=(
        Tags("<|channel>thought", "<channel|>", anywhere=True),
        Tags("thought\n", "<channel|>"),  # if the server omits special tokens
    ),
    late_tags=(Tags("<|channel>", "<channel|>", anywhere=True),),  # a channel without a name
    calls=(
        CallSyntax(("<|tool_call>", _CALL), _read_gemma4, ("<tool_call|>",)),
        CallSyntax(("call:",), _read_gemma4, begins=begins_line),
    ),
    answers=("<|channel>content\n", "<|channel>response\n", "<|channel>final\n"),
    silent=("<|tool_response>", "<turn|>"),
)
FUNCTION_GEMMA_TEXT = TaggedText(
    calls=(CallSyntax(("<start_function_call>",), _read_function_gemma, ("<end_function_call>",)),),
    silent=("<start_function_response>", "<end_of_turn>"),
)
