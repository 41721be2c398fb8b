"""Parts of a request beyond its schema: left out and listed, or refused with `--strict`.

Schemas are strict: they refuse a field or a kind of object that they do not know. If it has no
meaning for a local model, it is repaired here instead of refused: the field is removed, or replaced
by its equivalent, and the body is checked again. The client finds the names of removed fields in
the header `x-ignored-fields`, the operator in the request's log line. Wrong types, missing fields,
and what the answer must look like are never repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import BeforeValidator, ValidationError
from pydantic_core import PydanticCustomError

from gateway import exchange
from gateway.errors import ApiError
from gateway.openai.other_fields import NEUTRAL
from gateway.problems import place_of

Place = tuple[str | int, ...]
DROPPED: tuple[()] = ()  # replaces a removed value; a longer tuple replaces a value by several
MOST_REPAIRS = 10_000  # repairs in one round, which takes 0.2 s
_ROUNDS = 8  # rounds, because a repair may reveal others: a nested field, a kind inside a kind
_FORMS: set[Place] = {("response_format",), ("structured_outputs",), ("output_format",)}
_FORMS |= {("text", "format"), ("output_config", "format")}
_UNSET = frozenset(  # kinds of errors that an empty value causes where it means absent
    "dict_type list_type model_type model_attributes_type string_too_short literal_error"
    " blocks_type string_type int_type float_type bool_type unsupported".split()
)
_REDUCED = frozenset(  # fields that are reduced to their maximum if they exceed it
    "logprobs top_logprobs n_probs max_tokens max_completion_tokens max_output_tokens"
    " n_predict num_predict".split()
)


class Repair:
    """The replacement for an object that a schema refuses, or for one `up` levels above."""

    def __init__(self, instead: Any, up: int, lossless: bool) -> None:
        self.instead = instead
        self.up = up
        self.lossless = lossless


def tolerable(
    sentence: str, instead: Any = DROPPED, *, up: int = 0, lossless: bool = False
) -> PydanticCustomError:
    """Return an error that is raised only with `--strict`; otherwise `instead` replaces the object.

    lossless: the replacement means the same, so it is not listed.
    """
    repair = Repair(instead, up, lossless)
    return PydanticCustomError("tolerable", "{sentence}", {"sentence": sentence, "repair": repair})


def known(words: Collection[str]) -> BeforeValidator:
    """Return a validator for a string that is one of these words.

    Other strings, and numbers, are left out.
    """

    def check(word: Any) -> Any:
        if isinstance(word, str | float | int) and word not in words:
            raise tolerable(f"{str(word)[:64]} is not served: send one of {', '.join(words)}")
        return word

    return BeforeValidator(check, json_schema_input_type=str)


def checked(body: Any, check: Callable[[Any], Any]) -> Any:
    """Return the request that `check` makes of a body, repaired if necessary.

    Raises ValidationError for what is not repaired, ApiError for too many repairs.
    """
    strict = exchange.current().strict
    for _ in range(_ROUNDS):
        try:
            return check(body)
        except ValidationError as failure:
            if failure.error_count() > MOST_REPAIRS:
                raise ApiError(
                    400,
                    f"the body has more than {MOST_REPAIRS} fields that are not known here, or"
                    " are wrong: leave them out",
                ) from None
            edits: dict[str | int, Any] = {}
            for problem in failure.errors(include_url=False):
                _plan(edits, problem, strict)
            if not edits:
                raise
            body = _edited(body, edits)
    return check(body)


def _plan(edits: dict[str | int, Any], problem: Mapping[str, Any], strict: bool) -> None:
    """Add the repair of a problem, if there is one, to the edits of the body, a tree by path."""
    place: Place = place_of(problem["loc"])
    kind, value = problem["type"], problem["input"]
    unset = value in ([], {}, "") and kind in _UNSET  # PHP writes an empty object as a list
    if kind == "extra_forbidden":
        # A client's own field name may look like that of an alternative.
        place = (*place_of(problem["loc"][:-1]), problem["loc"][-1])
        may_go = place[-1] in NEUTRAL if strict else not _forms_the_answer(place)
        if not may_go and value:  # programs send empty values for unused fields
            return
        _edit(edits, place, DROPPED)
        if value is not None:
            exchange.current().ignore(_name(place))
    elif strict:
        return
    elif kind == "tolerable":
        repair: Repair = problem["ctx"]["repair"]
        target = place[: len(place) - repair.up]
        _edit(edits, target, repair.instead)
        if not repair.lossless:
            tag = value if repair.up and isinstance(value, str) else ""
            exchange.current().ignore(_name(target) + (f"[{tag}]" if tag else ""))
    elif (value is None or unset) and place and isinstance(place[-1], str):
        _edit(edits, place, DROPPED)  # null means absent; a field that is required is then missing
    elif kind == "int_type" and isinstance(value, float) and value.is_integer():
        _edit(edits, place, int(value))
    elif kind == "less_than_equal" and place[-1] in _REDUCED:
        _edit(edits, place, int(problem["ctx"]["le"]))
        exchange.current().ignore(_name(place))


def _forms_the_answer(place: Place) -> bool:
    """Return whether a path is inside a field that determines the form of the answer."""
    return any(place[:size] in _FORMS and len(place) > size for size in (1, 2))


def _edit(edits: dict[str | int, Any], place: Place, value: Any) -> None:
    for step in place[:-1]:
        inner = edits.setdefault(step, _Edits())
        if not isinstance(inner, _Edits):
            return  # inside a part that is removed itself
        edits = inner
    if place:
        edits[place[-1]] = value


class _Edits(dict[str | int, Any]):
    """The edits below a path; a type of its own, so that it is never mistaken for a value."""


def _edited(node: Any, edits: Mapping[str | int, Any]) -> Any:
    """Return a copy of a body with the edits; unchanged parts are shared with the body."""
    copy: Any = list(node) if isinstance(node, list) else dict(node)
    for step, edit in edits.items():
        if not _holds(copy, step):
            continue  # created by a validator, and not in the body
        below = copy[step]
        if not isinstance(edit, _Edits):
            copy[step] = edit
        elif isinstance(below, dict | list):
            copy[step] = _edited(below, edit)
    if isinstance(copy, list):
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in copy)
        return [each for several in entries for each in several]
    return {name: each for name, each in copy.items() if each is not DROPPED}


def _holds(node: Any, step: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(step, int) and step < len(node)
    return step in node


def _name(place: Place) -> str:
    """Return the name of a path: `tools[].defer_loading` for `("tools", 0, "defer_loading")`."""
    return "".join("[]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")
