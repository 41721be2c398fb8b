"""Kimi: marked sections with the model's own ids in K2, nested tags (XTML) in K3."""

from __future__ import annotations

import re
from dataclasses import replace

from common.formats.answer import Call
from common.formats.cursor import Markers, Unreadable, Wait
from common.formats.json_calls import read_arguments
from common.formats.reading import CallSyntax, Reading, Tags
from common.formats.sections import Section
from common.formats.tagged_calls import CallTags
from common.formats.tagged_text import TaggedText
from common.formats.values import parts

_ARGUMENTS = "<|tool_call_argument_begin|>"
_CALL_END = "<|tool_call_end|>"
_ID_ALONE = re.compile(r"\d+|call_\w+|chatcmpl-tool-\w+")
"""Only a number, or another server's id, which Kimi K2 copies from earlier turns."""
_IDENTITY = re.compile(r"(?:functions\.)?([^\s<`]+?)(?::\d+)?")


def _read_call(reading: Reading) -> Wait[Call]:
    """Read `functions.NAME:INDEX`, which is also the call's id, and JSON."""
    cursor = reading.cursor
    words: list[str] = []
    marker = yield from cursor.until(Markers([_ARGUMENTS, _CALL_END, "{", "\n\n"]), words.append)
    identity = "".join(words).strip()
    named = _IDENTITY.fullmatch(identity)
    if marker not in (_ARGUMENTS, "{") or not named:
        raise cursor.unreadable()
    yield from cursor.accept(_ARGUMENTS)
    yield from cursor.space()
    name, bare = named[1], named[1].partition(":")[0]
    name = bare if bare in reading.tools and name not in reading.tools else name
    reading.begin(name, identity)
    if (yield from cursor.at([_CALL_END])):
        return Call(name, "{}", identity)
    arguments = yield from read_arguments(reading, (_CALL_END,))
    if name not in reading.tools and _ID_ALONE.fullmatch(name):
        # The arguments may identify the tool.
        fitting = reading.tools.accepting(key for key, _ in parts(arguments))
        if len(fitting) == 1:
            name = fitting[0]
        elif name.isdecimal():
            raise Unreadable
    return Call(name, arguments, identity)


_SECTION = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    _CALL_END,
    _read_call,
    unmarked=(_ARGUMENTS, "{"),
)
_SINGULAR = replace(
    _SECTION, opener="<|tool_call_section_begin|>", closer="<|tool_call_section_end|>"
)
"""Section markers of some K2 checkpoints; vLLM accepts both spellings too."""
_XTML = CallTags(
    call="<|open|>call",
    call_close="<|close|>call<|sep|>",
    parameter="<|open|>argument",
    parameter_close="<|close|>argument<|sep|>",
    header_close="<|sep|>",
    block="<|open|>tools<|sep|>",
    block_close="<|close|>tools<|sep|>",
    name_key="tool",
    parameter_key="key",
    text_flag=("type", "string"),
    json_block="<|open|>json",
    json_close="<|close|>json<|sep|>",
)
K2_TEXT = TaggedText(
    tags=(Tags("<think>", "</think>"),),
    calls=(
        CallSyntax(_SECTION.openers, _SECTION.read, _SECTION.closers),
        CallSyntax((_SINGULAR.opener,), _SINGULAR.read, (_SINGULAR.closer,)),
    ),
)
K3_TEXT = TaggedText(
    tags=(Tags("<|open|>think<|sep|>", "<|close|>think<|sep|>", anywhere=True),),
    calls=(CallSyntax(_XTML.openers, _XTML.read, _XTML.closers),),
    answers=("<|open|>response<|sep|>",),
    silent=("<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
)
