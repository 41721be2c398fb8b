"""An answer in Ollama's form: one JSON object per line, or a single one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from gateway import exchange
from gateway.blocks import Blocks, consume
from gateway.calls import Done, Event, Progress
from gateway.errors import ApiError
from gateway.openai.answer import token_logprob
from gateway.refusals import TEXT, ErrorForm, schema_of
from gateway.sse import Answer

Json = dict[str, Any]
_NS = 1_000_000  # nanoseconds in a millisecond


def chat_part(content: str, thinking: str, calls: list[Json]) -> Json:
    """Return the fields of `/api/chat` for a part of an answer."""
    others = {"thinking": thinking, "tool_calls": calls}
    present = {name: value for name, value in others.items() if value}
    return {"message": {"role": "assistant", "content": content, **present}}


def text_part(content: str, thinking: str, _: list[Json]) -> Json:
    return {"response": content, **({"thinking": thinking} if thinking else {})}


class OllamaAnswer(Answer[Event]):
    """An answer that is being generated."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str, part: Callable[[str, str, list[Json]], Json]) -> None:
        self._model = model
        self._part = part
        self._blocks = Blocks()
        self._logprobs: list[Json] = []

    def take(self, event: Event) -> list[Json]:
        """Return the lines for an event; a call is sent when it is complete."""
        if isinstance(event, Progress):
            return [] if event.processed else self.beat()
        consume(self._blocks, event)
        if isinstance(event, Done):
            calls = self._calls()
            lines = [self._line(self._part("", "", calls), False)] if calls else []
            return [*lines, self._end(event, self._part("", "", []))]
        self._logprobs += event.logprobs
        if not (event.content or event.reasoning or event.logprobs):
            return []
        part = self._part(event.content, event.reasoning, [])
        return [self._line(part | _logprobs(event.logprobs), False)]

    def whole(self) -> Json:
        blocks = self._blocks
        assert blocks.done is not None
        part = self._part(blocks.text_of("text"), blocks.text_of("reasoning"), self._calls())
        return self._end(blocks.done, part | _logprobs(self._logprobs))

    def beat(self) -> list[Json]:
        return [self._line(self._part("", "", []), False)]

    def fail(self, error: ApiError) -> list[Json]:
        return [error_body(error)]

    def write(self, parts: Iterable[Json]) -> str:
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in parts)

    def _calls(self) -> list[Json]:
        calls = []
        for block in self._blocks.calls:
            call, arguments = block.call, json.loads(block.text)
            function = {"index": call.index, "name": call.name, "arguments": arguments}
            calls.append({"id": call.id, "function": function})
        return calls

    def empty(self, reason: str) -> Json:
        """Return the answer to a request that only loads or unloads a model."""
        return self._line(self._part("", "", []), True) | {"done_reason": reason}

    def _end(self, done: Done, part: Json) -> Json:
        used = done.usage
        return self._line(part, True) | {
            "done_reason": done.finish_reason,
            **durations(),
            "prompt_eval_count": used.prompt_tokens,
            "prompt_eval_duration": int(used.prefill_ms * _NS),
            "eval_count": used.completion_tokens,
            "eval_duration": int(used.decode_ms * _NS),
        }

    def _line(self, part: Json, done: bool) -> Json:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **part, "done": done}


def durations() -> Json:
    """Return how long the request has taken, in nanoseconds. The time of a load is not measured."""
    return {"total_duration": int(1000 * exchange.current().seconds) * _NS, "load_duration": 0}


def _logprobs(entries: Sequence[Json]) -> Json:
    return {"logprobs": [*map(token_logprob, entries)]} if entries else {}


def error_body(error: ApiError) -> Json:
    """Return an error; the message begins with the field at fault."""
    return {"error": error.full_message}


ERRORS = ErrorForm("OllamaError", schema_of(error=TEXT), error_body)
