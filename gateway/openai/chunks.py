"""Chunks of a stream as text: what all of them repeat is written once.

A chunk is sent for every few letters of every stream, so this is the gateway's hot path: one small
object to JSON, and no models. ASCII only, because some clients take U+2028 for the end of a line.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.generation import Progress
from gateway.openai.identity import Identity

_encode = json.JSONEncoder(separators=(",", ":")).encode


class ChunkWriter:
    """Writes the events of one stream. `kind` is OpenAI's `object`.

    with_usage: every chunk says `"usage": null`, as OpenAI's do where a usage chunk follows.
    """

    def __init__(self, kind: str, identity: Identity, *, with_usage: bool) -> None:
        head = {
            "id": identity.id,
            "object": kind,
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": identity.system_fingerprint,
        }
        self._head = f"data: {_encode(head)[:-1]}"
        self._start = f'{self._head},"choices":['
        self._end = '],"usage":null}\n\n' if with_usage else "]}\n\n"

    def chunk(self, choice: dict[str, Any]) -> str:
        """The event of a chunk with one choice."""
        return f"{self._start}{_encode(choice)}{self._end}"

    def progress(self, choice: dict[str, Any], progress: Progress) -> str:
        """llama.cpp's `prompt_progress`, in a chunk that says nothing else."""
        numbers = {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.processed,
            "time_ms": round(progress.ms),
        }
        return f'{self._start}{_encode(choice)}],"prompt_progress":{_encode(numbers)}}}\n\n'

    def usage(self, usage: dict[str, Any]) -> str:
        """The event of the chunk that has no choice, but the usage."""
        return f'{self._head},"choices":[],"usage":{_encode(usage)}}}\n\n'
