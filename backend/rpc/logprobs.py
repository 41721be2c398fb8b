"""Converts log-probabilities to the JSON of Reply.logprobs, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from backend.engine.events import PromptLogprobs, TokenLogprob
from backend.engine.token_text import TextStream

LEAST = -9999.0  # OpenAI's value for a probability of zero, whose logarithm JSON cannot represent

BytesOf = Callable[[int], bytes]


def as_json(
    entries: Sequence[TokenLogprob],
    bytes_of: BytesOf,
    prompt: PromptLogprobs | None = None,
    text: TextStream | None = None,
) -> bytes:
    """Return `{"content": […]}` with one item per generated token, and `"prompt"` if requested.

    bytes_of: the bytes of a token.
    text: a new decoder, for the texts of the prompt's tokens.
    """
    shown: dict[str, Any] = {"content": [_entry(entry, bytes_of) for entry in entries]}
    if prompt is not None and text is not None:
        shown["prompt"] = list(_of_prompt(prompt, bytes_of, text))
    return json.dumps(shown, ensure_ascii=False).encode()


def _of_prompt(
    prompt: PromptLogprobs, bytes_of: BytesOf, text: TextStream
) -> Iterator[dict[str, Any]]:
    """Yield one item per token; their texts concatenated give the prompt."""
    unknown: dict[str, Any] = {"logprob": None, "top_logprobs": []}
    first = _token(prompt.first, bytes_of) | unknown
    entries = [first, *(_entry(entry, bytes_of) for entry in prompt.rest)]
    for count, entry in enumerate(entries, 1):
        written = text.add(entry["id"])
        yield entry | {"text": written + text.finish() if count == len(entries) else written}


def _entry(entry: TokenLogprob, bytes_of: BytesOf) -> dict[str, Any]:
    top = [_with_value(token, value, bytes_of) for token, value in entry.top]
    return _with_value(entry.token, entry.logprob, bytes_of) | {"top_logprobs": top}


def _with_value(token: int, value: float, bytes_of: BytesOf) -> dict[str, Any]:
    return _token(token, bytes_of) | {"logprob": max(value, LEAST)}


def _token(token: int, bytes_of: BytesOf) -> dict[str, Any]:
    written = bytes_of(token)
    return {
        "id": token,
        # Bytes that are only part of a character are shown as escapes, so nothing is lost.
        "token": written.decode(errors="backslashreplace"),
        "bytes": list(written),
    }
