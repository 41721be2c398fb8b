"""Converts a request's constraint into an llguidance grammar.

This Python code parses untrusted text, which may be crafted to take long. So it runs in the child
process that tries grammars (see `trial`).
"""

from __future__ import annotations

from typing import Any

import llguidance

from backend.engine.constraints.schema import OPTIONS, enforceable, read_schema
from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.constraints.special_tokens import SpecialTokens
from backend.engine.errors import InvalidRequest
from common.call_grammar import CallableTool, call_grammar
from common.gbnf import GbnfError, gbnf_to_lark

_UNFORCED = '\n%llguidance {"no_forcing": true}\n'
"""Otherwise llguidance computes at once all text that must follow, and never returns where a
grammar forces a text without end."""


def grammar_of(spec: ConstraintSpec, chat_format: str, special: SpecialTokens) -> dict[str, Any]:
    """The llguidance grammar of the constraint itself, without reasoning or text around it.

    chat_format: the name of the model's call format. Raises InvalidRequest.
    """
    match spec.kind:
        case "json_schema":
            return {"json_schema": read_schema(spec.text)}
        case "gbnf":
            try:
                return {"lark_grammar": gbnf_to_lark(spec.text) + _UNFORCED}
            except GbnfError as fault:
                raise InvalidRequest(f"the grammar is not valid GBNF: {fault}") from None
        case "lark":
            return {"lark_grammar": spec.text + _UNFORCED}
        case "regex":
            return {"lark_grammar": f"start: /{llguidance.regex_to_lark(spec.text, '')}/"}
    return {"lark_grammar": _calls(spec, chat_format, special)}


def _calls(spec: ConstraintSpec, chat_format: str, special: SpecialTokens) -> str:
    try:
        tools = [CallableTool.of(tool) for tool in spec.tools]
        for tool in tools:
            enforceable(tool.schema)
        return call_grammar(chat_format, tools, special, OPTIONS, parallel=spec.parallel)
    except ValueError as fault:
        raise InvalidRequest(str(fault)) from None
