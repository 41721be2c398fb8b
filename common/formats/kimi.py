"""Kimi K2: marked sections with the model's own ids."""

from __future__ import annotations

import re
from dataclasses import replace

from common.formats.sections import Section
from common.tool_schema import ToolSchemas

_IDENTITY = re.compile(r"(?:functions\.)?([^\s<`]+?)(?::\d+)?")


def _named(identity: str, tools: ToolSchemas) -> tuple[str, str]:
    """The name in `functions.NAME:INDEX`, which is also the call's id."""
    if not (found := _IDENTITY.fullmatch(identity)):
        return "", ""
    name, bare = found[1], found[1].partition(":")[0]
    return bare if bare in tools and name not in tools else name, identity


_SECTION = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    _named,
    "<|tool_call_argument_begin|>",
    unmarked=True,
)
_SINGULAR = replace(
    _SECTION, opener="<|tool_call_section_begin|>", closer="<|tool_call_section_end|>"
)
"""Section markers of some K2 checkpoints; vLLM accepts both spellings too."""
K2_CALLS = (_SECTION.syntax, replace(_SINGULAR.syntax, openers=(_SINGULAR.opener,)))
