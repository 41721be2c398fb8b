"""Reads a request's Metadata: chat template variables, and `mlx.` keys.

LocalAI copies a client's `metadata` object into Metadata, so a client can send any key. The prefix
`mlx.` marks the keys for this backend, and an unknown or invalid one is an error; all other keys
are labels and are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.engine.request import Extras, InfillPrompt, Position
from backend.engine.setting_rule import Rule
from backend.engine.settings import RULES
from backend.rpc.checks import json_value, require_most
from common.field_names import named
from common.wording import nearest, shown

PREFIX = "mlx."
_LONGEST_LIST = 2 << 20
_LARGEST_BLOB = 64 * 1024
# Arguments that control rendering itself; clients may not set them.
RESERVED = frozenset(
    "add_generation_prompt add_special_tokens bos_token chat_template continue_final_message"
    " conversation documents eos_token max_length messages padding processor_kwargs raise_exception"
    " return_assistant_tokens_mask return_dict return_tensors self strftime_now tokenize"
    " tokenizer_kwargs tools truncation".split()
)
_WINDOW = Rule(int, 0, "", 0, 1 << 20)
_FLAG = Rule(bool, False, "")


def extras_of(metadata: Mapping[str, str], defaults: Extras) -> Extras:
    """Return the model's defaults with the `mlx.` keys applied. Raises InvalidRequest."""
    given: dict[str, Any] = {}
    for key, text in metadata.items():
        if not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX)
        if name not in KEYS:
            similar = nearest(name, KEYS)
            known = ", ".join(f"{PREFIX}{each}" for each in sorted(KEYS))
            hint = f"; did you mean '{PREFIX}{similar}'?" if similar else f": use one of {known}"
            raise InvalidRequest(f"unknown {named('Metadata')} key {shown(key)}{hint}")
        try:
            given[name] = KEYS[name](text.strip())
        except ValueError as wanted:
            raise InvalidRequest(
                f"{named(f'Metadata {key}')} is {shown(text)}: send {wanted}"
            ) from None
    return replace(defaults, **given)


def template_arguments(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return chat template variables by name; separate keys override chat_template_kwargs."""
    field = "Metadata chat_template_kwargs"
    blob = metadata.get("chat_template_kwargs", "")
    require_most(field, blob, _LARGEST_BLOB, "characters")
    arguments = {
        name: value
        for name, value in json_value(dict, field, blob).items()
        if not name.startswith(PREFIX) and _may_set(name, metadata)
    }
    if thinking := metadata.get("enable_thinking", ""):
        arguments["enable_thinking"] = thinking
    if "enable_thinking" in arguments:
        value = arguments["enable_thinking"]
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value.strip().lower())
        if not isinstance(value, bool):
            raise InvalidRequest(f"{named('Metadata enable_thinking')} must be true or false")
        arguments["enable_thinking"] = value
    if effort := metadata.get("reasoning_effort", ""):
        arguments["reasoning_effort"] = effort
    return arguments


def _may_set(name: str, metadata: Mapping[str, str]) -> bool:
    """Return whether chat_template_kwargs may set the variable.

    LocalAI copies labels into chat_template_kwargs too; such a copy is dropped, not refused.
    """
    if name not in RESERVED:
        return True
    if name in metadata:
        return False
    raise InvalidRequest(
        f"{named('Metadata chat_template_kwargs')} sets {name}, which the backend sets itself:"
        " remove it"
    )


def _listed(what: str, convert: Callable[[Any], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a reader of a JSON list.

    what: the description of the list in errors.
    convert: converts each element; raises ValueError for a wrong element.
    """

    def read(text: str) -> tuple[Any, ...]:
        if len(text) > _LONGEST_LIST:
            raise ValueError(f"at most {_LONGEST_LIST} characters, not {len(text)}")
        try:
            values = json.loads(text)
            if isinstance(values, list):
                return tuple(map(convert, values))
        except (ValueError, RecursionError):
            pass
        raise ValueError(what)

    return read


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError
    return value


def _position(value: Any) -> Position:
    if isinstance(value, list) and 1 <= len(value) <= 3:
        return tuple(map(_integer, value))
    return _integer(value)


def _infill(text: str) -> InfillPrompt:
    wanted = 'a JSON object with `suffix`, a text, and maybe `files`, a list of {"name", "text"}'
    try:
        given = json.loads(text)
        suffix, files = given["suffix"], given.get("files", [])
        found = tuple((file["name"], file["text"]) for file in files)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError(wanted) from None
    if not all(isinstance(each, str) for each in (suffix, *chain(*found))):
        raise ValueError(wanted)
    return InfillPrompt("", suffix, found)


_TOKENS = _listed("a JSON list of token ids", _integer)
_POSITIONS = _listed(
    "a JSON list with, for each item, the index of a message, or a list of that index, the number"
    " of characters before the item, and its number among the items there",
    _position,
)

# By key: its reader, which raises a ValueError that says what to send. docs/fields.md describes the
# keys.
KEYS: dict[str, Callable[[str], Any]] = {
    **{
        name: RULES[name].read
        for name in "min_tokens xtc_probability xtc_threshold grammar_type parallel_tool_calls"
        " thinking_budget".split()
    },
    **dict.fromkeys(
        "grammar_or_calls stream_logprobs stream_progress prompt_logprobs prompt_only count_only"
        " continue_final_message".split(),
        _FLAG.read,
    ),
    **dict.fromkeys(("presence_window", "frequency_window"), _WINDOW.read),
    **dict.fromkeys(("stop_token_ids", "prompt_token_ids"), _TOKENS),
    "infill": _infill,
    "adapter": str,
    **dict.fromkeys(("image_messages", "audio_messages", "video_messages"), _POSITIONS),
}
