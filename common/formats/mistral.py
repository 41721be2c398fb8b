"""Mistral: `[TOOL_CALLS]` before a JSON list, or before each name with its `[ARGS]`."""

from __future__ import annotations

from common.formats.cursor import Wait
from common.formats.json_calls import read_bare_calls
from common.formats.pythonic import NAME
from common.formats.reading import CallSyntax, Reading, begins_line, no_content_yet
from common.formats.sections import Section

_CALLS = "[TOOL_CALLS]"
_BROKEN = ("[TOOL_CALLS", "TOOL_CALLS]", "TOOL_CALLS", "[TOOL_CALL]")
_ARGUMENTS = ("[ARGS]", "[ARGS", "ARGS]", "[args]", "[ARGUMENTS]", "=")
"""The marker before the arguments, and what models write instead."""
_SECTION = Section((), (), (_CALLS, *_BROKEN, f"{_CALLS}:"), (), between=_ARGUMENTS)


def _read_without_opening(reading: Reading) -> Wait[None]:
    """Read a call whose first token is missing; `[ARGS]` still identifies it."""
    if (yield from reading.peek()) in ("[", "{"):
        yield from read_bare_calls(reading)
    elif (yield from reading.follow(NAME, (_ARGUMENTS[0], "[CALL_ID]"))):
        yield from _SECTION.read_named(reading)
    else:
        raise reading.unreadable()


CALLS = (
    CallSyntax((_CALLS,), _SECTION.read),
    CallSyntax(_BROKEN, _SECTION.read, begins=begins_line, broken=True),
    CallSyntax(("[", "{"), _read_without_opening, begins=no_content_yet, by_name=True),
)
