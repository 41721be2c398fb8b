"""Extra variables for the chat template, from the Metadata of a request (contract 3.5).

`chat_template_kwargs` is whatever a client wrote, so it may set variables of the template but
none of the arguments that decide what is rendered and how. The host copies each label of a
client's `metadata` into it as well; such a copy is dropped, not refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.rpc import extras

LARGEST = 64 * 1024
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "eos_token",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Variables by name; the explicit keys win over the blob."""
    arguments = {
        name: value
        for name, value in _blob(metadata.get("chat_template_kwargs", "")).items()
        if not name.startswith(extras.PREFIX) and _may_be_set(name, metadata)
    }
    if thinking := metadata.get("enable_thinking", ""):
        arguments["enable_thinking"] = thinking
    if "enable_thinking" in arguments:
        arguments["enable_thinking"] = _flag("enable_thinking", arguments["enable_thinking"])
    if effort := metadata.get("reasoning_effort", ""):
        arguments["reasoning_effort"] = effort
    return arguments


def _may_be_set(name: str, metadata: Mapping[str, str]) -> bool:
    if name not in RESERVED:
        return True
    if name in metadata:
        return False
    raise InvalidRequest(
        f"Metadata chat_template_kwargs sets {name}, which the backend sets itself: remove it"
    )


def _blob(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    if len(text) > LARGEST:
        raise InvalidRequest(
            f"Metadata chat_template_kwargs is {len(text)} characters long: send at most {LARGEST}"
        )
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"Metadata chat_template_kwargs is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("Metadata chat_template_kwargs must be a JSON object")
    return value


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower())
    if isinstance(value, bool):
        return value
    raise InvalidRequest(f"Metadata {name} must be true or false")
