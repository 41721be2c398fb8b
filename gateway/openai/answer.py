"""An OpenAI answer with one or several choices: whole, or as chunks, usage and `[DONE]`.

A chunk is sent for every few letters of every stream, so writing one is the gateway's hot path: it
encodes one small object and uses no pydantic models. The text is ASCII, because some clients treat
U+2028 as the end of a line.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from gateway.errors import ApiError
from gateway.generation import Done, Event, Piece, Progress, Usage
from gateway.models.config import ModelConfig
from gateway.sse import DONE, Answer, openai_error

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


_encode = json.JSONEncoder(separators=(",", ":")).encode


class Choice(Protocol):
    """One of the answers, as items of `choices`."""

    def begin(self) -> Sequence[Json]:
        """Return the items of the first chunks.

        None if they have been sent, or if there are none.
        """

    def chunks(self, event: Piece | Done) -> Iterable[Json]:
        """Add an event, and return its items, of which the caller must consume all."""

    def nothing(self) -> Json:
        """Return an item that adds nothing to the answer."""

    def whole(self) -> Json:
        """Return the item of the complete answer."""

    def add(self, event: Piece | Done) -> None:
        """Add an event to an answer that is sent in one piece."""


class OpenAIAnswer(Answer[tuple[int, Event]]):
    """The answers to one request, with the fields of `head` in each of its objects.

    usage: the last chunk has the usage, and all others `"usage": null`, as OpenAI's do.
    per_prompt: how many choices in a row have the same prompt.
    progress: llama.cpp's `prompt_progress` is sent.
    """

    def __init__(
        self,
        head: Json,
        choices: Sequence[Choice],
        *,
        usage: bool,
        progress: bool,
        per_prompt: int,
    ) -> None:
        self._choices = choices
        self._ends: dict[int, Done] = {}
        self._whole = head
        self._usage = usage
        self._progress = progress
        self._per_prompt = per_prompt
        self._head = f"data: {_encode(head)[:-1]}"
        self._start = f'{self._head},"choices":['
        self._end = '],"usage":null}\n\n' if usage else "]}\n\n"

    def take(self, event: tuple[int, Event]) -> list[str]:
        index, arrived = event
        choice = self._choices[index]
        parts = [*map(self._chunk, choice.begin())]
        if not isinstance(arrived, Progress):
            parts += map(self._chunk, choice.chunks(arrived))
        elif self._progress:
            parts.append(self._reported(choice.nothing(), arrived))
        if isinstance(arrived, Done):
            self._ends[index] = arrived
        if len(self._ends) == len(self._choices):
            if self._usage:
                usage = _encode(self._used())
                parts.append(f'{self._head},"choices":[],"usage":{usage}}}\n\n')
            parts.append(DONE)
        return parts

    def add(self, event: tuple[int, Event]) -> None:
        index, arrived = event
        if not isinstance(arrived, Progress):
            self._choices[index].add(arrived)
        if isinstance(arrived, Done):
            self._ends[index] = arrived

    def beat(self) -> list[str]:
        begun = [entry for choice in self._choices for entry in choice.begin()]
        return [*map(self._chunk, begun or [self._choices[0].nothing()])]

    def fail(self, error: ApiError) -> list[str]:
        return [openai_error(error)]

    def whole(self) -> Json:
        choices = [choice.whole() for choice in self._choices]
        return {**self._whole, "choices": choices, "usage": self._used()}

    def write(self, parts: Iterable[str]) -> str:
        return "".join(parts)

    def _used(self) -> Json:
        ends = [self._ends[index].usage for index in range(len(self._choices))]
        return usage_of(ends, self._per_prompt)

    def _chunk(self, entry: Json) -> str:
        return f"{self._start}{_encode(entry)}{self._end}"

    def _reported(self, entry: Json, progress: Progress) -> str:
        numbers = _encode(progress_of(progress))
        return f'{self._start}{_encode(entry)}],"prompt_progress":{numbers}}}\n\n'


def progress_of(progress: Progress) -> Json:
    """Return llama.cpp's `prompt_progress`."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(progress.ms),
    }
