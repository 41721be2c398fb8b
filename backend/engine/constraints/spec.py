"""What a request constrains its answer to, as plain data: importing this stays cheap."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["gbnf", "json_schema", "lark", "regex", "calls"]


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """One constraint. `text` is the grammar, schema or expression, and '' for calls.

    tools: for calls, the OpenAI tool objects that may be called, already narrowed to a named one.
    parallel: for calls, whether more than one call may be made. optional: for calls, whether text
    may stand before them, or be all. answer: what an answer without calls must match; its text then
    is all, and none stands before calls.
    """

    kind: Kind
    text: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    parallel: bool = True
    optional: bool = False
    answer: ConstraintSpec | None = None


def spec_of_grammar(text: str, kind: str = "auto") -> ConstraintSpec:
    """The constraint that the field Grammar asks for.

    `auto` takes a text that parses as a JSON object for a JSON schema, and any other for GBNF
    (contract 3.7.6). Raises ValueError for a kind that does not exist.
    """
    if kind == "auto":
        return ConstraintSpec("json_schema" if _is_json_object(text) else "gbnf", text)
    for known in get_args(Kind):
        if kind == known != "calls":
            return ConstraintSpec(known, text)
    raise ValueError(f"{kind!r} is no kind of grammar: use auto, gbnf, json_schema, lark or regex")


def _is_json_object(text: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except RecursionError:
        return True  # no rule of a GBNF grammar begins with a brace
    except ValueError:
        return False
