"""Llama 3 and 4, LFM2 and others whose calls may have no marker: JSON or Python calls."""

from __future__ import annotations

from common.formats.cursor import Cursor, Wait
from common.formats.json_calls import accept_separator, read_bare_calls, read_json_calls
from common.formats.pythonic import read_fenced_pythonic, read_pythonic
from common.formats.qwen import FUNCTION_CALLS
from common.formats.reading import CallSyntax, Reading

_JSON_TAG = "<|python_tag|>"
_LIST_TAG, _LIST_CLOSE = "<|python_start|>", "<|python_end|>"


def _is_answer(reading: Reading, _opener: str) -> bool:
    return not reading.answer.reasoning


def _read_unmarked(reading: Reading) -> Wait[None]:
    """Read JSON or a list of Python calls. Without a marker, only offered tools count as calls."""
    if (yield from _is_json(reading.cursor)):
        yield from read_bare_calls(reading)
    else:
        yield from read_pythonic(reading, offered=True)


def _is_json(cursor: Cursor) -> Wait[bool]:
    """Whether an object comes next, or a list that begins with one."""
    with cursor.ahead():
        if (yield from cursor.accept("[")):
            yield from cursor.space()
        return (yield from cursor.peek()) == "{"


def _read_tagged(reading: Reading) -> Wait[None]:
    """Read the calls after a tag: JSON separated by semicolons, or Python calls."""
    cursor = reading.cursor
    cursor.take(len(reading.opener))
    yield from cursor.space()
    if not (yield from _is_json(cursor)) and not (yield from cursor.at(["```"])):
        yield from read_pythonic(reading, (_LIST_CLOSE,), offered=reading.opener != _LIST_TAG)
    else:
        yield from read_json_calls(reading, (";",))
        while (yield from accept_separator(reading)):
            yield from read_json_calls(reading, (";",))
    yield from cursor.accept_after_space(_LIST_CLOSE)


def fenced(opener: str, closer: str) -> CallSyntax:
    def read(reading: Reading) -> Wait[None]:
        cursor = reading.cursor
        cursor.take(len(opener))
        yield from cursor.space()
        if (yield from _is_json(cursor)):
            yield from read_json_calls(reading, (closer,))
        elif not (yield from cursor.at([closer])):
            yield from read_fenced_pythonic(reading, (closer,))
        yield from cursor.accept_after_space(closer)

    return CallSyntax((opener,), read, (closer,))


UNMARKED = CallSyntax(("{", "["), _read_unmarked, begins=_is_answer)
LFM2 = fenced("<|tool_call_start|>", "<|tool_call_end|>")
CALLS = (
    CallSyntax((_JSON_TAG, _LIST_TAG), _read_tagged, (_LIST_CLOSE,)),
    FUNCTION_CALLS,
    LFM2,
    UNMARKED,
)
"""mlx-lm's name for LFM2's format is vLLM's for Llama's, so these read both."""
