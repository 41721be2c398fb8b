"""Calls that any model may write: with the markers of another family, in a code block, or bare.

Models are finetuned on the answers of others, and keep their habits. Such calls count only if the
tools were offered; those without a marker also only if nothing comes after them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from common.formats import qwen
from common.formats.cursor import SPACE, Wait
from common.formats.json_calls import read_code_blocks
from common.formats.pythonic import (
    NAME,
    TOOL_CODE,
    at_named_call,
    read_fence,
    read_statements,
)
from common.formats.reading import CallSyntax, Reading, begins_line, no_content_yet, own_line
from common.formats.shapes import (
    PythonShape,
    Shape,
    TagShape,
    invoked,
    json_block,
    read_unmarked,
    tagged,
)

_FENCE = "```"
_BLOCKS = (
    *("tools", "tool", "tool_calls", "function_call", "toolcall", "tool-call", "functioncall"),
    *("tool_use", "function_calls", "tool_call", "TOOL_CALL", "TOOL_CALLS", "Tool_call"),
)
_CODE_BLOCKS = ("```tool_call", "```function_call")
_BRACKETED = ("TOOL_CALL", "tool_call", "tool_calls")
"""The tags around calls that models write instead of their own."""
_NAMED = ("tool_call", "function_call", "tool", "call")
"""The tags that models write with the name of the tool in them."""


def _read_python_block(reading: Reading) -> Wait[None]:
    """Read a code block that contains nothing but Python calls."""
    yield from read_fence(reading)
    if (yield from reading.peek()) == "[":
        yield from read_unmarked(reading, (_FENCE,))
    else:
        yield from read_statements(reading)
    yield from reading.accept_after_space(_FENCE)


def _read_named(reading: Reading) -> Wait[None]:
    """Read Python calls on lines of their own, or JSON behind the name of a tool."""
    python = (yield from at_named_call(reading)) == "("
    if not python and not (yield from reading.follow(NAME, SPACE, "{", SPACE, ('"', "}"))):
        raise reading.unreadable()
    yield from read_statements(reading)


_INVOKED = tuple(
    invoked(prefix, "function_calls", flags=("true", "false")).tags for prefix in ("", "antml:")
)
_ALONE = replace(qwen.TAGS, block="", block_close="", lines="paired")
_COMMON = (
    *map(tagged, _INVOKED),
    *(tagged(replace(_ALONE, call=f"<{word}=", call_close=f"</{word}>")) for word in _NAMED),
    CallSyntax(_CODE_BLOCKS, read_code_blocks, begins=begins_line, last=True),
    json_block("<function_calls>", "</function_calls>"),
    json_block("<|FunctionCallBegin|>", "<|FunctionCallEnd|>"),
    TOOL_CODE,
    CallSyntax((_FENCE,), read_code_blocks, begins=no_content_yet, last=True),
    CallSyntax(("{", "["), read_unmarked, begins=own_line, last=True),
    CallSyntax((), _read_named, begins=no_content_yet, by_name=True, last=True),
)
_PYTHON = (
    CallSyntax(("```python", "```py"), _read_python_block, begins=no_content_yet, last=True),
)
"""What only models that write Python calls mean as calls."""


def foreign_calls(
    own: Collection[CallSyntax], marked: Iterable[CallSyntax], shape: Shape | None
) -> tuple[CallSyntax, ...]:
    """Return how models of a family write calls beside its own.

    marked: the calls of all families that have markers.
    shape: how the family's own calls are written.
    """
    tags = replace(qwen.TAGS, lines="paired")
    if isinstance(shape, TagShape) and shape.parameter.startswith("<"):
        tags = shape.tags
    blocks = [(f"<{name}>", f"</{name}>") for name in _BLOCKS]
    blocks += [(f"[{name}]", f"[/{name}]") for name in _BRACKETED]
    wrapped = (
        CallSyntax((opening,), replace(tags, block=opening, block_close=closing).read)
        for opening, closing in blocks
    )
    python = _PYTHON if isinstance(shape, PythonShape) else ()
    others = (each for each in marked if each not in own)
    found = (*wrapped, *_COMMON, *python, *others)
    return tuple(dict.fromkeys(replace(each, foreign=True, closers=()) for each in found))
