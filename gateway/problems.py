"""Chooses which of the problems found by pydantic to report, and with which path.

For a union pydantic reports what is wrong with every alternative, and writes the alternative's name
into the path. A client does not know these names: it gets the error of the alternative that matched
furthest, with a path that exists in its own body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Problem = Mapping[str, Any]
Place = tuple[str | int, ...]

# How pydantic names alternatives of a union: types, classes, validators and dictionary keys.
_ALTERNATIVE = re.compile(
    r"(str|int|float|bool|none|constrained-\w+|\[key\]|[A-Z]\w*|(list|dict|literal|nullable"
    r"|function-\w+|tagged-union|json-or-python|model|lax-or-strict|definition-ref)\[.*)",
    re.DOTALL,
)
_EXPECTED = "Input should be "
_WORDS = {
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"), "Input should be an object"
    ),
    "list_type": "Input should be a list",
    "string_type": "Input should be a string",
    "int_type": "Input should be an integer",
    "float_type": "Input should be a number",
    "bool_type": "Input should be true or false",
    "too_short": "Input should have at least one entry",
    "string_pattern_mismatch": "Input should be a token id",  # of `logit_bias`, the only pattern
    "string_too_short": "Input should not be empty",
}


def likeliest(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the problem to report. Its `loc` has only names and indices of the request.

    If a value matches none of the types accepted at its position, one message lists them.
    """
    cleaned = [
        dict(problem, loc=place_of(problem["loc"]), msg=_WORDS.get(problem["type"], problem["msg"]))
        for problem in problems
    ]
    deepest = max(cleaned, key=lambda problem: _rank(problem, cleaned[0]["loc"]))
    words = [p["msg"] for p in cleaned if p["loc"] == deepest["loc"]]
    if len(words) > 1 and all(word.startswith(_EXPECTED) for word in words):
        kinds = dict.fromkeys(word.removeprefix(_EXPECTED) for word in words)
        deepest["msg"] = _EXPECTED + " or ".join(kinds)
    return deepest


def place_of(place: Place) -> Place:
    """Return a path without the alternatives that pydantic tried."""
    own = _own(place)  # the field's own name may look like one
    rest = place[len(own) :]
    return own + tuple(
        step for step in rest if isinstance(step, int) or not _ALTERNATIVE.fullmatch(step)
    )


def _rank(problem: Problem, first: Place) -> int:
    """Return the depth of a problem about the same field as `first`; -1 for other fields."""
    place: Place = problem["loc"]
    return len(place) if _own(place) == _own(first) else -1


def _own(place: Place) -> Place:
    """Return the first part of a path, which names a field of the request."""
    return place[: 2 if place[:1] == ("body",) else 1]
