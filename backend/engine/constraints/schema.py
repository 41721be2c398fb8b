"""Prepares JSON schemas for llguidance; refuses keywords that llguidance would not enforce."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from backend.engine.errors import InvalidRequest
from common.json_schema import bounded, without_nulls
from common.wording import shown

MAX_DEPTH = 60
MOST_PROPERTIES = 5_000  # in one schema; llguidance's time grows with their square
MOST_OPTIONAL = 1_200  # in one object: each has four Earley items in a row (matching.LIMITS)
MOST_PATTERNS = 100  # in one object, because each pair is intersected
_LONGEST_POINTER = 500  # characters
_DEEP = f"the JSON schema is nested more than {MAX_DEPTH} deep"

Pointer = tuple[str | int, ...]

OPTIONS: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
    "coerce_one_of": False,
}
"""At most one space after a separator, as models write it, and no other white space: if it were
unlimited, a model could write white space for ever."""

_SCHEMA = frozenset(
    "items additionalItems additionalProperties not if then else contains propertyNames"
    " unevaluatedItems unevaluatedProperties".split()
)
_SCHEMAS = frozenset("anyOf oneOf allOf prefixItems items".split())
_NAMED = frozenset("properties patternProperties $defs definitions dependentSchemas".split())
_REFUSED = frozenset(
    "not if then else contains minContains maxContains uniqueItems propertyNames unevaluatedItems"
    " unevaluatedProperties dependentRequired dependentSchemas dependencies $dynamicRef"
    " $recursiveRef extends disallow divisibleBy".split()
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
"""Values with which a keyword has no effect."""
_KEYWORDS = {
    word.lower(): word
    for word in (
        *"type enum const minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength"
        " maxLength pattern format minItems maxItems required minProperties maxProperties $ref"
        " $anchor".split(),
        *_SCHEMA,
        *_SCHEMAS,
        *_NAMED,
        *_REFUSED,
    )
}


def read_schema(text: str) -> dict[str, Any]:
    """Parse a schema. Raises InvalidRequest, whose message has the JSON pointer to the fault."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise InvalidRequest(_DEEP) from None
    except json.JSONDecodeError as fault:
        raise InvalidRequest(f"the JSON schema is not valid JSON: {fault}") from None
    except ValueError:  # Python reads integers of up to 4300 digits
        raise InvalidRequest(
            "the JSON schema has a number with too many digits: use at most 18"
        ) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the JSON schema must be a JSON object, but it is {shown(text)}")
    _require_shallow(schema)  # what prepares the schema is recursive
    return enforceable(bounded(without_nulls(schema)))


def _require_shallow(schema: Any) -> None:
    """Raise InvalidRequest for a value that is nested more than MAX_DEPTH deep."""
    level: list[tuple[Pointer, Any]] = [((), schema)]
    for _ in range(MAX_DEPTH):
        level = [
            ((*pointer, step), inner)
            for pointer, value in level
            for step, inner in (value.items() if isinstance(value, dict) else enumerate(value))
            if isinstance(inner, dict | list)
        ]
    if level:
        raise InvalidRequest(f"{_DEEP}{_at(level[0][0])}")


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema without keywords that have no effect.

    Raises InvalidRequest for a keyword that cannot be enforced; its message has the JSON pointer
    (RFC 6901) to the keyword.
    """
    sizes: list[int] = []
    cleaned: dict[str, Any] = _checked((), schema, sizes)
    if sum(sizes) > MOST_PROPERTIES:
        raise _too_many(sum(sizes), "properties", MOST_PROPERTIES, ())
    return {**cleaned, "x-guidance": dict(OPTIONS)}


def _checked(at: Pointer, schema: Any, sizes: list[int]) -> Any:
    """Return a subschema as `enforceable` does, and add the sizes of its objects to `sizes`."""
    if not isinstance(schema, Mapping):
        return schema
    sizes.append(_properties_in(at, schema))
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        here = (*at, keyword)
        _require_enforceable(here, keyword, value)
        if keyword in _SCHEMAS and isinstance(value, list):
            value = [_checked((*here, index), inner, sizes) for index, inner in enumerate(value)]
        elif keyword in _NAMED and isinstance(value, Mapping):
            value = {name: _checked((*here, name), each, sizes) for name, each in value.items()}
        elif keyword in _SCHEMA:
            value = _checked(here, value, sizes)
        if keyword not in _REFUSED and keyword != "x-guidance":
            kept[keyword] = value
    return kept


def _properties_in(at: Pointer, schema: Mapping[str, Any]) -> int:
    """Return how many properties one object has. Raises InvalidRequest if there are too many."""
    properties, patterns, required = (
        value if isinstance(value := schema.get(name), kind) else ()
        for name, kind in (("properties", dict), ("patternProperties", dict), ("required", list))
    )
    needed = {name for name in required if isinstance(name, str)}
    counts = (
        (len(patterns), "patternProperties", MOST_PATTERNS),
        (len(properties), "properties", MOST_PROPERTIES),
        (
            len(properties) - len(needed.intersection(properties)),
            "optional properties",
            MOST_OPTIONAL,
        ),
    )
    for count, what, most in counts:
        if count > most:
            raise _too_many(count, what, most, at)
    return len(properties)


def _too_many(count: int, what: str, most: int, at: Pointer) -> InvalidRequest:
    advice = "list more of them in required, or use fewer" if what.startswith("o") else "use fewer"
    return InvalidRequest(
        f"the JSON schema has {count} {what}{_at(at) if at else ''}, but at most {most} can be"
        f" enforced: {advice}"
    )


def _require_enforceable(pointer: Pointer, keyword: str, value: Any) -> None:
    if keyword in _REFUSED and not _is_neutral(keyword, value):
        raise InvalidRequest(
            f"the JSON schema's {keyword!r} cannot be enforced{_at(pointer)}: leave it"
            " out, or use type, properties, items, enum, anyOf or pattern instead"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(
            f"the JSON schema's {keyword!r} is not a finite number{_at(pointer)}:"
            " leave it out, or use a smaller number"
        )
    if keyword == "multipleOf" and value == 0:
        raise InvalidRequest(
            f"the JSON schema's 'multipleOf' is 0{_at(pointer)}: it must be above 0"
        )
    known_spelling = _KEYWORDS.get(keyword.lower(), keyword)
    if known_spelling != keyword:
        raise InvalidRequest(
            f"the JSON schema's {keyword!r} is not a keyword{_at(pointer)}: did you"
            f" mean {known_spelling!r}?"
        )


def _at(pointer: Pointer) -> str:
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in pointer)
    return f" at #/{'/'.join(steps)}"[:_LONGEST_POINTER]


def _is_neutral(keyword: str, value: Any) -> bool:
    return any(type(value) is type(none) and value == none for none in _NEUTRAL.get(keyword, ()))
