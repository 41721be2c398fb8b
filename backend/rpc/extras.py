"""Settings of a request that the wire has no field for: Metadata keys that begin with `mlx.`.

Hosts copy the labels of a client's `metadata` object into Metadata (contract 3.5.3), so anybody
can send these. The prefix keeps them apart from labels, and a wrong one is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.engine.request import Extras
from common.options import did_you_mean, shown

PREFIX = "mlx."
MOST_MIN_TOKENS = 1 << 20
LARGEST_IDS = 2 << 20


def of(metadata: Mapping[str, str], defaults: Extras) -> Extras:
    """What the request sets, over the model's defaults. Raises InvalidRequest."""
    given: dict[str, Any] = {}
    for key, text in metadata.items():
        if not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX)
        if name not in READERS:
            hint = did_you_mean(name, READERS) or f"; known are {', '.join(sorted(READERS))}"
            raise InvalidRequest(f"unknown Metadata key {shown(key)}{hint}")
        try:
            given[name] = READERS[name](text.strip().lower())
        except ValueError as error:
            raise InvalidRequest(f"Metadata {key} is {shown(text)}: {error}") from None
    return replace(defaults, **given)


def _count(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text[:9]) <= MOST_MIN_TOKENS:
        return int(text)
    raise ValueError(f"send a whole number from 0 to {MOST_MIN_TOKENS}")


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if 0 <= value <= 1:
        return value
    raise ValueError("send a number from 0 to 1")


def _flag(text: str) -> bool:
    if text in ("true", "false"):
        return text == "true"
    raise ValueError("send true or false")


def _grammar_type(text: str) -> str:
    if text in ("auto", "gbnf", "json_schema", "lark", "regex"):
        return text
    raise ValueError("send auto, gbnf, json_schema, lark or regex")


def _ids(text: str) -> tuple[int, ...]:
    if len(text) > LARGEST_IDS:
        raise ValueError(f"it is {len(text)} characters long; send at most {LARGEST_IDS}")
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError):
        ids = None
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        return tuple(ids)
    raise ValueError("send a JSON list of token ids")


def _indices(text: str) -> tuple[int, ...]:
    try:
        return _ids(text)
    except ValueError:
        raise ValueError("send a JSON list with the number of a message for each item") from None


READERS: Mapping[str, Callable[[str], Any]] = {
    "min_tokens": _count,
    "xtc_probability": _share,
    "xtc_threshold": _share,
    "presence_window": _count,
    "frequency_window": _count,
    "grammar_type": _grammar_type,
    "parallel_tool_calls": _flag,
    "grammar_or_calls": _flag,
    "stream_logprobs": _flag,
    "prompt_token_ids": _ids,
    "prompt_logprobs": _flag,
    "prompt_only": _flag,
    "count_only": _flag,
    "continue_final_message": _flag,
    "image_messages": _indices,
    "audio_messages": _indices,
}
