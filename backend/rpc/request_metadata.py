"""Reads a request's Metadata: chat template variables, and `mlx.` keys.

LocalAI copies a client's `metadata` object into Metadata, so a client can send any key. The prefix
`mlx.` marks the keys for this backend, and an unknown or invalid one is an error; all other keys
are labels and are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Key:
    """A Metadata key. `read` raises a ValueError that says what to send."""

    read: Callable[[str], Any]
    meaning: str


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
            given[name] = KEYS[name].read(text.strip())
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

KEYS: dict[str, Key] = {
    name: Key(RULES[name].read, meaning)
    for name, meaning in {
        "min_tokens": "minimum length of the answer in tokens",
        "xtc_probability": "XTC sampling: probability per token, from 0 to 1",
        "xtc_threshold": "XTC sampling: probability above which a token counts as likely",
        "grammar_type": "how Grammar is read: `auto`, `gbnf`, `json_schema`, `lark` or `regex`",
        "parallel_tool_calls": "`false`: an answer that must call a tool makes one call",
        "thinking_budget": "maximum number of reasoning tokens in an answer to Messages; then"
        " reasoning is closed. 0: none; -1: no limit. If it is not sent, `reasoning_effort` sets"
        " the limit, unless the chat template uses that variable: minimal and low 1024, medium"
        " 8192, high 24576",
    }.items()
}
KEYS |= {
    name: Key(_FLAG.read, f"`true`: {meaning}")
    for name, meaning in {
        "grammar_or_calls": "the answer must match Grammar or call the offered tools as ToolChoice"
        " allows; otherwise it must match Grammar",
        "stream_logprobs": "if log-probabilities are requested, each streamed Reply carries those"
        " of its own tokens, and the last Reply only the rest",
        "stream_progress": "until the first text, streamed Replies report prompt progress:"
        ' `logprobs` is `{"progress": {"total", "cached", "processed"}}` in tokens; the first'
        " comes as soon as the request is accepted",
        "prompt_logprobs": "the last Reply's `logprobs` has a list `prompt` next to `content`, with"
        " one entry per token of the raw prompt and TopLogprobs alternatives; `text` is what the"
        " token adds to the text, and the first `logprob` is null",
        "prompt_only": "the prompt is prefilled and nothing is generated, regardless of Tokens; the"
        " finish reason is `length`",
        "count_only": "nothing is computed; `prompt_tokens` counts the prompt, which may be longer"
        " than the context",
        "continue_final_message": "the last of Messages is the beginning of the answer, and the"
        " model continues it",
    }.items()
}
KEYS |= {
    "presence_window": Key(
        _WINDOW.read,
        "number of recent tokens of prompt and output that PresencePenalty covers; 0: the whole"
        " output and none of the prompt",
    ),
    "frequency_window": Key(_WINDOW.read, "the same for FrequencyPenalty"),
    "stop_token_ids": Key(
        _TOKENS, "JSON list of token ids: any of them ends the answer, and its text is left out"
    ),
    "prompt_token_ids": Key(
        _TOKENS, "JSON list of token ids: the raw prompt, instead of Prompt; no BOS is added"
    ),
    "infill": Key(
        _infill,
        'JSON `{"suffix", "files": [{"name", "text"}]}`: the answer is the text between Prompt and'
        " the suffix; needs a model whose tokenizer has fill-in-the-middle tokens",
    ),
    "adapter": Key(
        str, "name of one of the adapters of the option `adapters`; empty, or not sent: none"
    ),
    "image_messages": Key(
        _POSITIONS,
        "JSON list: for each of Images the index of its message in Messages, from 0; or a list of"
        " that index, the number of characters of its content before the image (default 0), and a"
        " number that orders items between the same two characters (default 0)",
    ),
    "audio_messages": Key(_POSITIONS, "the same for Audios"),
    "video_messages": Key(_POSITIONS, "the same for Videos"),
}
