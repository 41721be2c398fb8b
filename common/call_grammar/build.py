"""The call grammar for each chat format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.call_grammar.calls import fenced_call, json_call, python_call, tag_text, tagged_call
from common.call_grammar.rules import Markers, RuleBook, either
from common.call_grammar.tools import CallableTool
from common.formats.families import BY_NAME
from common.formats.shapes import FencedShape, JsonShape, PythonShape, Shape, TagShape

FAMILIES: Mapping[str, Shape] = {
    name: family.shape for name, family in BY_NAME.items() if family.shape
}
"""How calls are written, by the name of the format."""
_NOTHING = '""'


def writes_hermes_calls(format_name: str) -> bool:
    """Return whether the format's calls are JSON between <tool_call> and </tool_call>."""
    return FAMILIES.get(format_name) == FAMILIES["hermes"]


def call_grammar(
    format_name: str,
    tools: Sequence[CallableTool],
    markers: Markers,
    json_options: Mapping[str, Any],
    *,
    parallel: bool,
    shape: Shape | None = None,
) -> str:
    """Return a Lark grammar with the rule `start` for one call, or with `parallel` for one or more.

    Raises ValueError, with an explanation, for a format or a tool that cannot be enforced.

    json_options: llguidance's options for JSON in the grammar.
    shape: the shape of calls of a format without a name.
    """
    if not tools:
        raise ValueError("there is no tool to call")
    family = BY_NAME.get(format_name)
    shape = shape or (family.shape if family else None)
    if family and family.by_token and markers.has(family.by_token[0]):
        shape = family.by_token[1]
    if shape is None:
        raise ValueError(
            "tool calls cannot be enforced with this model: its answers have the format"
            f" {format_name}, which has no grammar for calls; require no call and mark no tool as"
            " strict, or load the model with another tool_parser"
        )
    book = RuleBook(markers, json_options)
    around, several = ("", "", ""), parallel
    if isinstance(shape, TagShape) and shape.each:
        shape = shape.alone
    if not isinstance(shape, FencedShape):
        around = (shape.opening, shape.separator, shape.closing)
    if isinstance(shape, JsonShape):
        several = parallel and shape.several
    opening, separator, closing = (tag_text(shape, book, text) for text in around)
    later = call = either([_call(shape, book, tool) for tool in tools])
    if isinstance(shape, JsonShape):
        later = either([json_call(shape, book, tool, first=False) for tool in tools])
    calls = f"{call} ({separator or _NOTHING} {later})*" if several else call
    return book.written(f"{opening} {calls} {closing}")


def _call(shape: Shape, book: RuleBook, tool: CallableTool) -> str:
    match shape:
        case JsonShape():
            return json_call(shape, book, tool)
        case PythonShape():
            return python_call(book, tool)
        case FencedShape():
            return fenced_call(shape, book, tool)
        case TagShape():
            return tagged_call(shape, book, tool)
