"""DeepSeek: marked sections in V3 and V3.1, tagged parameters (DSML) from V3.2 on.

GigaChat 3.5 and Step 3 have variations of these.
"""

from __future__ import annotations

from dataclasses import replace

from common.formats.reading import CallSyntax
from common.formats.sections import Section
from common.formats.shapes import invoked, tagged

_SECTION = Section(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
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
    *(replace(each.syntax, openers=(each.opener,)) for each in _VARIANTS),
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
STEP_CALLS = (
    Section(
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_call_end｜>",
        tags=invoked("steptml:", "", opening="", closing="").tags,
    ).syntax,
)
