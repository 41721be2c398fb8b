"""DeepSeek: marked sections in V3 and V3.1, tagged parameters (DSML) from V3.2 on.

GigaChat 3.5 and Step 3 have variations of these.
"""

from __future__ import annotations

import re
from dataclasses import replace

from common.formats.answer import Call
from common.formats.cursor import Wait
from common.formats.json_calls import read_arguments
from common.formats.reading import CallSyntax, Reading
from common.formats.sections import Section
from common.formats.shapes import invoked, tagged

_SEPARATOR = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_NAME = re.compile(r"""[^\s{}<>`"]*""")
_NO_ARGUMENTS = ("", "null", "[]")


def _read_call(reading: Reading) -> Wait[Call]:
    """`function<sep>NAME`, a line break and fenced JSON in V3; `NAME<sep>` and JSON in V3.1."""
    cursor = reading.cursor
    yield from cursor.space()
    words = yield from cursor.run(_NAME)
    yield from cursor.space()
    separated = yield from cursor.accept(_SEPARATOR)
    yield from cursor.space()
    after = (yield from cursor.run(_NAME)) if separated else ""
    name = words if after in _NO_ARGUMENTS else after
    yield from cursor.space()
    begun = yield from cursor.at(["{", '"', "```", _CALL_END])
    if not name or not (begun and (separated or begun == "{")):
        raise cursor.unreadable()
    if (yield from cursor.at([_CALL_END])):
        return Call(name, "{}")
    return Call(name, (yield from read_arguments(reading, ("```", _CALL_END), name=name)))


_SECTION = Section(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", _CALL_END, _read_call
)

_VARIANTS = tuple(
    replace(_SECTION, opener=f"<｜{words}｜>")
    for words in ("tool_calls_begin", "tool calls begin", r"tool\_calls\_begin", "tool▁calls")
)
"""Smaller models that were trained on DeepSeek's answers write the first marker so, and llama.cpp
reads it (deepseek_r1 in its common/chat).
"""


V3_CALLS = (
    _SECTION.syntax,
    *(CallSyntax((each.opener,), each.read, each.closers) for each in _VARIANTS),
)
DSML_SHAPES = tuple(
    invoked(prefix, block, flags=("true", "false"))
    for prefix, block in (
        ("｜DSML｜", "function_calls"),
        ("｜DSML｜", "tool_calls"),
        ("｜DSML｜ ", "calls"),
    )
)
_MISSPELT = tuple(
    replace(DSML_SHAPES[1].tags, block=f"<｜DSML｜{block}>") for block in ("toolcalls", "tool")
)
"""What DeepSeek V4 sometimes writes instead of its block's name, and vLLM reads."""
DSML_CALLS = (
    *(tagged(shape.tags) for shape in DSML_SHAPES),
    *(CallSyntax((tags.block,), tags.read, tags.closers) for tags in _MISSPELT),
    *V3_CALLS,
)
STEP_SHAPE = invoked(
    "steptml:",
    "",
    call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
    call_end="</steptml:invoke><｜tool_call_end｜>",
    forbidden=("<steptml:", "</steptml:", "<｜tool_"),
    opening="<｜tool_calls_begin｜>",
    closing="<｜tool_calls_end｜>",
)
_STEP = invoked("steptml:", "", opening="", closing="").tags


def _read_step(reading: Reading) -> Wait[Call]:
    """Read `function<sep>`, sometimes the tool's name, and a call with tagged parameters."""
    cursor = reading.cursor
    yield from cursor.space()
    yield from cursor.run(_NAME)
    if (yield from cursor.accept("<｜tool_sep｜>")):
        yield from cursor.run(_NAME)
    yield from cursor.space()
    return (yield from _STEP.read_call(reading))


STEP_CALLS = (
    Section(
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_call_end｜>",
        _read_step,
    ).syntax,
)
