"""What every object of one answer repeats: id, time, the model asked for, what computed it."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass

from gateway.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Identity:
    """The head of an answer. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def identity(prefix: str, model: str, config: ModelConfig) -> Identity:
    """A fresh one. The fingerprint stays while the model's file does."""
    digest = hashlib.blake2s(config.model_dump_json().encode(), digest_size=5)
    return Identity(
        f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model, f"fp_{digest.hexdigest()}"
    )
