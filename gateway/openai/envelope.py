"""The fields that an answer's objects and chunks share, and their JSON text.

A chunk is sent for every few letters of every stream, so writing one is the gateway's hot path: it
encodes one small object and uses no pydantic models. The text is ASCII, because some clients treat
U+2028 as the end of a line.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from gateway.generation import Progress, Usage
from gateway.models.config import ModelConfig

Json = dict[str, Any]
_encode = json.JSONEncoder(separators=(",", ":")).encode


def head_of(prefix: str, kind: str, model: str | None, config: ModelConfig) -> Json:
    """The first fields of every object of an answer; `kind` is OpenAI's `object`.

    model: as the client named it. The fingerprint stays the same while the model's file does.
    """
    digest = hashlib.blake2s(config.model_dump_json().encode(), digest_size=5)
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model or config.name,
        "system_fingerprint": f"fp_{digest.hexdigest()}",
    }


def usage_of(answers: Sequence[Usage], per_prompt: int = 1) -> Json:
    """Usage of a request: every prompt counts once, however many answers it has.

    per_prompt: how many answers in a row have the same prompt.
    """
    prompts = answers[::per_prompt]
    prompt_count = sum(usage.prompt_tokens for usage in prompts)
    generated = sum(usage.completion_tokens for usage in answers)
    return {
        "prompt_tokens": prompt_count,
        "completion_tokens": generated,
        "total_tokens": prompt_count + generated,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.reasoning_tokens for usage in answers)
        },
    }


class ChunkWriter:
    """Writes the events of one stream, each with the fields of `head`.

    with_usage: every chunk has `"usage": null`, as OpenAI's do if a usage chunk follows.
    """

    def __init__(self, head: Json, *, with_usage: bool) -> None:
        self._head = f"data: {_encode(head)[:-1]}"
        self._start = f'{self._head},"choices":['
        self._end = '],"usage":null}\n\n' if with_usage else "]}\n\n"

    def chunk(self, choice: Json) -> str:
        return f"{self._start}{_encode(choice)}{self._end}"

    def progress(self, choice: Json, progress: Progress) -> str:
        """llama.cpp's `prompt_progress`, in a chunk without other content."""
        numbers = {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.processed,
            "time_ms": round(progress.ms),
        }
        return f'{self._start}{_encode(choice)}],"prompt_progress":{_encode(numbers)}}}\n\n'

    def usage(self, usage: Json) -> str:
        """The event of the chunk that has only the usage."""
        return f'{self._head},"choices":[],"usage":{_encode(usage)}}}\n\n'
