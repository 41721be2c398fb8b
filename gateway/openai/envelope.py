"""The fields that an answer's objects and chunks share."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from typing import Any

from gateway.generation import Usage
from gateway.models.config import ModelConfig

Json = dict[str, Any]


def head_of(prefix: str, kind: str, model: str | None, config: ModelConfig) -> Json:
    """Return the first fields of every object of an answer; `kind` is OpenAI's `object`.

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


def usage_of(answers: Sequence[Usage], per_prompt: int) -> Json:
    """Return the usage of a request: every prompt counts once, however many answers it has.

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
