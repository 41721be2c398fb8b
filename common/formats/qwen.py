"""Qwen3, Hermes and other families with `<tool_call>` blocks: JSON or tagged parameters."""

from __future__ import annotations

from dataclasses import replace

from common.formats.reading import CallSyntax, begins_line
from common.formats.shapes import TagShape, tagged

SHAPE = TagShape(
    opening="<tool_call>\n",
    call="<function={name}>\n",
    parameter="<parameter={key}>\n",
    value_end="\n</parameter>\n",
    call_end="</function>\n",
    closing="</tool_call>",
    separator="\n",
    each=True,
    lines="dropped",
)
TAGS = SHAPE.tags
MARKED_CALLS = tagged(TAGS)
_RESPELT = CallSyntax(
    ("<|tool_call>", "<|tool_call|>", "<tool_call|>", "tool_call>", TAGS.call[1:]),
    TAGS.read,
    begins=begins_line,
)
"""The opening tags with wrong or missing brackets."""
_ELEMENTS = replace(
    tagged(replace(TAGS, block="<function>", block_close="</function>")),
    openers=("<function>",),
    begins=begins_line,
)
"""Calls whose name and arguments are elements, as VibeThinker writes them."""
CALLS = (MARKED_CALLS, _RESPELT, _ELEMENTS)
