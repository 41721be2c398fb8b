"""Llama 3 and 4, LFM2 and others whose calls may have no marker: JSON or Python calls."""

from __future__ import annotations

from common.formats.cursor import Cursor, Wait
from common.formats.json_calls import read_bare_calls, read_json_calls
from common.formats.pythonic import read_fenced_pythonic, read_pythonic
from common.formats.qwen import FUNCTION_CALLS
from common.formats.reading import CallSyntax, Reading
from common.formats.tagged_calls import forms


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


def fenced(opener: str, closer: str = "", *, offered: bool = False) -> CallSyntax:
    """Calls after a marker, as JSON or in Python's notation. offered: only of offered tools."""
    closers = (closer,) if closer else ()

    def read(reading: Reading) -> Wait[None]:
        cursor = reading.cursor
        cursor.take(len(reading.opener))
        yield from cursor.space()
        if (yield from _is_json(cursor)):
            yield from read_json_calls(reading, forms(closer) if closer else (";",))
        elif not (yield from cursor.at(closers)):
            yield from read_fenced_pythonic(reading, closers and forms(closer), offered=offered)
        yield from cursor.accept_after_space(*forms(closer))

    return CallSyntax((opener,), read, closers)


UNMARKED = CallSyntax(("{", "["), _read_unmarked, begins=_is_answer)
LFM2 = fenced("<|tool_call_start|>", "<|tool_call_end|>")
CALLS = (
    fenced("<|python_start|>", "<|python_end|>"),
    fenced("<|python_tag|>", offered=True),
    FUNCTION_CALLS,
    LFM2,
    UNMARKED,
)
"""mlx-lm's name for LFM2's format is vLLM's for Llama's, so these read both."""
