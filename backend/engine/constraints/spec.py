"""A request's constraint as plain data, in a module that is cheap to import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["gbnf", "json_schema", "lark", "regex", "calls"]


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """A constraint on an answer. All fields after `text` are for calls."""

    kind: Kind
    text: str = ""  # the grammar, schema or regular expression; '' for calls
    # The OpenAI tool objects that may be called; a single one if the request names it.
    tools: tuple[Mapping[str, Any], ...] = ()
    parallel: bool = True  # whether several calls are allowed
    optional: bool = False  # whether text may come before the calls or instead of them
    # The constraint on an answer without calls; no text may then come before calls.
    answer: ConstraintSpec | None = None


def spec_of_grammar(text: str, kind: str = "auto") -> ConstraintSpec:
    """Return the constraint for the field Grammar.

    `auto` reads text that parses as a JSON object as a JSON schema, and any other text as GBNF, as
    LocalAI's vLLM backend does. Raises ValueError for an unknown kind.
    """
    if kind == "auto":
        return ConstraintSpec("json_schema" if _is_json_object(text) else "gbnf", text)
    for known in get_args(Kind):
        if kind == known != "calls":
            return ConstraintSpec(known, text)
    raise ValueError(
        f"{kind!r} is not a kind of grammar: use auto, gbnf, json_schema, lark or regex"
    )


def _is_json_object(text: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except RecursionError:
        return True  # no rule of a GBNF grammar begins with a brace
    except ValueError:
        return False
