"""Repairs a body with fields or objects that have no meaning for a local model.

Schemas refuse a field or a kind of object that they do not know. What they refuse is left out, or
replaced by its equivalent, and the body is checked again; with `--strict` it is refused. The client
finds the names of removed fields in the header `x-ignored-fields`, the operator in the request's
log line. Wrong types, missing fields, and what the answer must look like are never repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BeforeValidator, ValidationError
from pydantic_core import PydanticCustomError

from common.field_table import each
from gateway import exchange
from gateway.errors import ApiError
from gateway.refusals import place_of

# Well-behaved clients send these with every request, so `--strict` accepts them as well.
NEUTRAL = each(
    {
        "a label, or about a provider's service": "user safety_identifier metadata request_id store"
        " service_tier priority prompt_cache_key prompt_cache_retention verbosity speed"
        " user_profile_id client_metadata stream_options summary generate_summary cache_control"
        " citations caller allowed_callers eager_input_streaming detail annotations",
        "the server chooses": "cache_prompt id_slot penalize_nl n_keep n_discard min_keep"
        " speculative.n_max speculative.n_min speculative.p_min guided_decoding_backend",
    }
)
Place = tuple[str | int, ...]
DROPPED: tuple[()] = ()  # replaces a removed value; a longer tuple replaces a value by several
MOST_REPAIRS = 10_000  # repairs in one round, which takes 0.2 s
_ROUNDS = 8  # rounds, because a repair may reveal others: a nested field, a kind inside a kind
_FORMAT_PATHS: set[Place] = {  # where a request says what the answer must look like
    ("response_format",),
    ("structured_outputs",),
    ("output_format",),
    ("text", "format"),
    ("output_config", "format"),
}
_UNSET = frozenset(  # kinds of errors that an empty value causes where it means absent
    "dict_type list_type model_type model_attributes_type string_too_short literal_error"
    " blocks_type string_type int_type float_type bool_type float_parsing bool_parsing"
    " unsupported".split()
)
_REDUCED = frozenset(  # fields that are reduced to their maximum if they exceed it
    "logprobs top_logprobs n_probs max_tokens max_completion_tokens max_output_tokens"
    " n_predict num_predict".split()
)


@dataclass(frozen=True, slots=True)
class Repair:
    """A change of a body.

    place: the path of the value to replace.
    instead: what replaces the value; DROPPED removes it.
    listed: what the header `x-ignored-fields` lists; "" if the meaning is the same.
    """

    place: Place
    instead: Any
    listed: str = ""


def tolerable(
    sentence: str, instead: Any = DROPPED, *, up: int = 0, lossless: bool = False
) -> PydanticCustomError:
    """Return an error that is raised only with `--strict`; otherwise `instead` replaces the object.

    up: how many levels above the object the replaced object is.
    lossless: the replacement means the same, so it is not listed.
    """
    repair = {"instead": instead, "up": up, "lossless": lossless}
    return PydanticCustomError("tolerable", "{sentence}", {"sentence": sentence} | repair)


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
    """Return the result of `check` for a body, which is repaired if necessary.

    Raises ValidationError for what is not repaired, ApiError for too many repairs.
    """
    here = exchange.current()
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
            problems = failure.errors(include_url=False)
            repairs = [*filter(None, (_repair_of(problem, here.strict) for problem in problems))]
            if not repairs:
                raise
        for repair in repairs:
            if repair.listed:
                here.ignore(repair.listed)
        body = _edited(body, _tree_of(repairs))
    return check(body)


def _repair_of(problem: Mapping[str, Any], strict: bool) -> Repair | None:
    """Return the repair of a problem that pydantic reports; None if the body is refused for it."""
    kind, value, place = problem["type"], problem["input"], place_of(problem["loc"])
    if kind == "extra_forbidden":
        return _repair_of_unknown(problem["loc"], value, strict)
    if strict:
        return None
    if kind == "tolerable":
        return _repair_by_equivalent(place, value, problem["ctx"])
    # PHP writes an empty object as a list.
    absent = value is None or (value in ([], {}, "") and kind in _UNSET)
    if absent and place and isinstance(place[-1], str):
        return Repair(place, DROPPED)  # a field that is required is then missing
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return Repair(place, int(value))
    if kind == "less_than_equal" and place[-1] in _REDUCED:
        return Repair(place, int(problem["ctx"]["le"]), _name(place))
    return None


def _repair_of_unknown(loc: Place, value: Any, strict: bool) -> Repair | None:
    """Return the removal of a field that its schema does not have; None if it is refused.

    Fields with an empty value are always removed, because programs send them without using them.
    """
    # The name of the field itself may look like that of an alternative.
    place = (*place_of(loc[:-1]), loc[-1])
    in_format = any(place[:size] in _FORMAT_PATHS for size in range(1, len(place)))
    if value and (place[-1] not in NEUTRAL if strict else in_format):
        return None
    return Repair(place, DROPPED, "" if value is None else _name(place))


def _repair_by_equivalent(place: Place, value: Any, given: Mapping[str, Any]) -> Repair:
    """Return the repair that `tolerable` was given."""
    target = place[: len(place) - given["up"]]
    if given["lossless"]:
        return Repair(target, given["instead"])
    kind = f"[{value}]" if given["up"] and isinstance(value, str) else ""  # the object's `type`
    return Repair(target, given["instead"], _name(target) + kind)


class _Tree(dict[str | int, Any]):
    """Repairs by the steps of their paths: another tree below a step, or what replaces the value.

    It has a type of its own, so that it is never mistaken for such a value.
    """


def _tree_of(repairs: Iterable[Repair]) -> _Tree:
    tree = _Tree()
    for repair in repairs:
        node: Any = tree
        for step in repair.place[:-1]:
            node = node.setdefault(step, _Tree())
            if not isinstance(node, _Tree):
                break  # the repair is inside a part that is replaced itself
        else:
            if repair.place:
                node[repair.place[-1]] = repair.instead
    return tree


def _edited(node: Any, tree: _Tree) -> Any:
    """Return a copy of a body with the repairs; unchanged parts are shared with the body."""
    copy: Any = list(node) if isinstance(node, list) else dict(node)
    for step, edit in tree.items():
        if step not in (range(len(copy)) if isinstance(copy, list) else copy):
            continue  # created by a validator, and not in the body
        below = copy[step]
        if not isinstance(edit, _Tree):
            copy[step] = edit
        elif isinstance(below, dict | list):
            copy[step] = _edited(below, edit)
    if isinstance(copy, list):
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in copy)
        return [each for several in entries for each in several]
    return {name: each for name, each in copy.items() if each is not DROPPED}


def _name(place: Place) -> str:
    """Return a path as it is written: `tools[0].defer_loading`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(
        "."
    )
