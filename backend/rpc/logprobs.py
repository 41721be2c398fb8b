"""Log-probabilities → the JSON of Reply.logprobs, in OpenAI's shape (contract 4.10)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from backend.engine.events import TokenLogprob

_LEAST = -9999.0  # OpenAI's stand-in for a probability of zero, which JSON cannot write


def as_json(entries: Sequence[TokenLogprob], bytes_of: Callable[[int], bytes]) -> bytes:
    """`{"content": […]}` with an entry per generated token. bytes_of: what a token writes."""
    content = [
        _entry(entry.token, entry.logprob, bytes_of)
        | {"top_logprobs": [_entry(token, value, bytes_of) for token, value in entry.top]}
        for entry in entries
    ]
    return json.dumps({"content": content}, ensure_ascii=False).encode()


def _entry(token: int, value: float, bytes_of: Callable[[int], bytes]) -> dict[str, Any]:
    written = bytes_of(token)
    return {
        "id": token,
        # Bytes that are only a part of a character are shown as escapes, which lose nothing.
        "token": written.decode(errors="backslashreplace"),
        "bytes": list(written),
        "logprob": max(value, _LEAST),
    }
