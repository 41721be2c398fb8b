"""Qwen3, Hermes and other families with `<tool_call>` blocks: JSON or tagged parameters."""

from __future__ import annotations

import re
from dataclasses import replace

from common.formats.answer import Call
from common.formats.cursor import Wait
from common.formats.json_calls import read_arguments
from common.formats.reading import CallSyntax, Reading, begins_line
from common.formats.shapes import TagShape

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
_TAGS = SHAPE.tags
BLOCK_CLOSE = _TAGS.block_close
_NAMED_TAGS = replace(_TAGS, call="<function name=", parameter="<parameter name=")
"""With attributes in XML's form, as some models write them."""
TAGS = (_TAGS, _NAMED_TAGS)


def _read_marked(reading: Reading) -> Wait[None]:
    cursor = reading.cursor
    with cursor.ahead():
        yield from cursor.accept(_TAGS.block)
        yield from cursor.space()
        found = yield from cursor.at([_NAMED_TAGS.call, _ELEMENT, "<name>"])
    if found in (_ELEMENT, "<name>"):
        yield from _read_elements(reading)
    else:
        yield from (_NAMED_TAGS if found else _TAGS).read(reading)


def _read_elements(reading: Reading) -> Wait[None]:
    """Read calls whose name and arguments are elements, as VibeThinker writes them."""
    cursor = reading.cursor
    yield from cursor.accept(_TAGS.block)
    yield from cursor.space()
    while (yield from cursor.at([_ELEMENT, "<name>"])):
        function = yield from cursor.accept(_ELEMENT)
        yield from cursor.space()
        yield from cursor.expect("<name>")
        name = (yield from cursor.run(_ELEMENT_TEXT)).strip()
        yield from cursor.expect("</name>")
        yield from cursor.space()
        element = yield from cursor.accept(*_ARGUMENTS)
        if not (element or function):
            yield from cursor.drop_cut(_ARGUMENTS)
            raise cursor.unreadable()
        close = f"</{element[1:]}"
        reading.begin(name)
        arguments = "{}"
        if element and not (yield from cursor.accept(close)):
            arguments = yield from read_arguments(reading, (close, _TAGS.call_close))
        yield from cursor.accept_after_space(close)
        yield from cursor.space()
        if function:
            yield from cursor.expect(_TAGS.call_close)
        reading.call(Call(name, arguments))
        yield from cursor.space()
    yield from cursor.accept_after_space(BLOCK_CLOSE)


_ELEMENT, _ELEMENT_TEXT = "<function>", re.compile(r"[^<>]*")
_ARGUMENTS = ("<arguments>", "<parameters>")
MARKED_CALLS = CallSyntax((*_TAGS.openers, _NAMED_TAGS.call), _read_marked, _TAGS.closers)
_RESPELT = CallSyntax(
    ("<|tool_call>", "<|tool_call|>", "<tool_call|>", "tool_call>", _TAGS.call[1:]),
    _TAGS.read,
    begins=begins_line,
)
"""The opening tags with wrong or missing brackets."""
_ELEMENTS = CallSyntax((_ELEMENT,), _read_elements, begins=begins_line)
CALLS = (MARKED_CALLS, _RESPELT, _ELEMENTS)
