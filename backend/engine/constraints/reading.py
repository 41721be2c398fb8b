"""Converts a request's constraint into an llguidance grammar.

This Python code parses untrusted text, which may be crafted to take long. So it runs in the child
process that tries grammars (see `trial`).
"""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance

from backend.engine.constraints.schema import OPTIONS, enforceable, read_schema
from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.errors import InvalidRequest
from common.call_grammar import CallableTool, call_grammar
from common.call_grammar.rules import SpecialTokens
from common.formats.shapes import Shape
from common.gbnf import GbnfError, gbnf_to_lark

_UNFORCED = '\n%llguidance {"no_forcing": true}\n'
_MOST_FORCED = 5_000
_REPEATS = re.compile(r"\{\d\d|\{\d.*\{\d", re.DOTALL)
"""A count of ten or more, or several counts, in a pattern."""


def grammar_of(
    spec: ConstraintSpec, chat_format: str, special: SpecialTokens, shape: Shape | None = None
) -> dict[str, Any]:
    """Return the llguidance grammar of the constraint alone, without reasoning or text around it.

    chat_format: the name of the model's call format.
    shape: the shape of calls, for a format without a name.
    Raises InvalidRequest.
    """
    lark = _lark(spec, chat_format, special, shape)
    return {"lark_grammar": lark if _forces_little(spec) else lark + _UNFORCED}


def _forces_little(spec: ConstraintSpec) -> bool:
    """Return whether all forced text is short, so that llguidance may compute it in advance.

    By default llguidance does so for each mask, and allows only the tokens into which the tokenizer
    splits the forced text. A long constant takes a second, and forced text without an end takes for
    ever.
    """
    if spec.kind in ("gbnf", "lark"):
        return False
    text = json.dumps(spec.tools) if spec.kind == "calls" else spec.text
    return len(text) <= _MOST_FORCED and not _REPEATS.search(text)


def _lark(
    spec: ConstraintSpec, chat_format: str, special: SpecialTokens, shape: Shape | None
) -> str:
    match spec.kind:
        case "json_schema":
            return f"start: %json {json.dumps(read_schema(spec.text))}"
        case "gbnf":
            try:
                return gbnf_to_lark(spec.text)
            except GbnfError as fault:
                raise InvalidRequest(f"the grammar is not valid GBNF: {fault}") from None
        case "lark":
            return spec.text
        case "regex":
            return f"start: /{llguidance.regex_to_lark(spec.text, '')}/"
    return _calls(spec, chat_format, special, shape)


def _calls(
    spec: ConstraintSpec, chat_format: str, special: SpecialTokens, shape: Shape | None
) -> str:
    try:
        tools = [CallableTool.of(tool) for tool in spec.tools]
        for tool in tools:
            enforceable(tool.schema)
        return call_grammar(
            chat_format, tools, special, OPTIONS, parallel=spec.parallel, shape=shape
        )
    except ValueError as fault:
        raise InvalidRequest(str(fault)) from None
