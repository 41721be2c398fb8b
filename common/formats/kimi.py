"""Kimi K2: marked sections with the model's own ids."""

from __future__ import annotations

import re
from dataclasses import replace

from common.formats.answer import Call
from common.formats.cursor import Markers, Unreadable, Wait
from common.formats.json_calls import read_arguments
from common.formats.reading import CallSyntax, Reading
from common.formats.sections import Section
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
K2_CALLS = (_SECTION.syntax, CallSyntax((_SINGULAR.opener,), _SINGULAR.read, (_SINGULAR.closer,)))
