"""Readers of families whose calls are almost like another family's."""

from __future__ import annotations

import re

from common.formats.cursor import Wait
from common.formats.json_calls import read_bare_calls, read_json_calls
from common.formats.reading import CallSyntax, Reading, begins_line, no_content_yet
from common.formats.shapes import invoked, json_block, tagged

MINIMAX_SHAPE = invoked("", "minimax:tool_call", lines="paired")
_INVOKE = MINIMAX_SHAPE.tags
MINIMAX_CALLS = (
    tagged(_INVOKE),
    CallSyntax((f"{_INVOKE.call[1:]} name=",), _INVOKE.read, begins=begins_line),
    json_block("<tool_calls>", "</tool_calls>"),  # MiniMax M1
)
MUSE_SHAPE = invoked("atem:", "function_calls", undeclared="guess")
_ATEM = MUSE_SHAPE.tags
_TO, _RECIPIENT = " to=", re.compile(r"[^\s<]*")


def _read_addressed(reading: Reading) -> Wait[None]:
    """Read a message to a tool, ` to=NAME<|message|>`, with the calls as its text."""
    cursor = reading.cursor
    cursor.take(len(_TO))
    name = yield from cursor.run(_RECIPIENT)
    reading.begun = any(offered.startswith(name) for offered in reading.tools.names)
    yield from cursor.expect("<|message|>")
    yield from cursor.space()
    yield from _ATEM.read(reading)


def _read_unaddressed(reading: Reading) -> Wait[None]:
    reading.begun = True
    yield from _ATEM.read(reading)


GLIMMER_CALLS = (
    CallSyntax((_TO,), _read_addressed, _ATEM.closers, no_content_yet),
    CallSyntax((_ATEM.block,), _read_unaddressed, _ATEM.closers, no_content_yet),
)
_IM_END = "<|im_end|>"


def _read_unmarked_list(reading: Reading) -> Wait[None]:
    yield from read_bare_calls(reading, (_IM_END,))
    yield from reading.cursor.accept_after_space(_IM_END)


HYPERCLOVA_CALLS = (
    json_block(" -> tool/function_call", _IM_END),
    CallSyntax(("[",), _read_unmarked_list, (_IM_END,), no_content_yet),
)
_INVOKE_JSON, _MODEL, _END = "<|content_invoke_tool_json|>", "<|message_model|>", "<|end_message|>"


def _read_inkling(reading: Reading) -> Wait[None]:
    """Skip a message's header with the tool's name, and read the call as JSON, which repeats it."""
    cursor = reading.cursor
    yield from cursor.accept(_MODEL)
    if not (yield from cursor.more()):
        return
    yield from cursor.run(_RECIPIENT)
    yield from cursor.expect(_INVOKE_JSON)
    yield from read_json_calls(reading, (_END,))
    yield from cursor.accept_after_space(_END)


INKLING_SILENT = (
    _MODEL,
    "<|content_text|>",
    "<|content_invoke_tool_text|>",
    "<|content_tool_error|>",
    _END,
    "<|content_model_end_sampling|>",
)
INKLING_CALLS = (
    CallSyntax((_MODEL, _INVOKE_JSON), _read_inkling, (_END,)),
    CallSyntax((), _read_inkling, begins=no_content_yet, by_name=True),
)
