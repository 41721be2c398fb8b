"""Builds an Anthropic message, as one object or as the events of a stream.

Content blocks follow each other: thinking, text, and one block for each call. How much of a prompt
was cached is known only at the end, so `message_start` counts the complete prompt as uncached, and
`message_delta` separates the two.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from gateway import exchange
from gateway.anthropic.request import MessagesRequest
from gateway.blocks import Block, Blocks, Step
from gateway.calls import Done, Event, Progress, Usage
from gateway.errors import ApiError
from gateway.openai.messages import SEAL
from gateway.refusals import TEXT, ErrorForm, schema_of
from gateway.sse import NamedEvents

Json = dict[str, Any]
# For each kind of block: the name of its type, of its deltas, and of their field.
_KINDS = {
    "reasoning": ("thinking", "thinking_delta", "thinking"),
    "text": ("text", "text_delta", "text"),
    "call": ("tool_use", "input_json_delta", "partial_json"),
}
_LATE = 60.0  # seconds since the request, after which pings are not enough
# By HTTP status (API reference, "Errors").
_ERRORS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ERROR = schema_of(type=TEXT, message=TEXT) | {"additionalProperties": {"type": "object"}}


class MessageAnswer(NamedEvents[Event]):
    """A message that is being generated."""

    def __init__(self, request: MessagesRequest, model: str) -> None:
        self._request = request
        self._shows_thinking = getattr(request.thinking, "display", None) != "omitted"
        self._content: list[Json] = []
        self._blocks = Blocks()
        self._started = False
        self._message: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": _usage(Usage()),
        }

    def beat(self, prompt_tokens: int = 0) -> list[Json]:
        """Return a ping, after the start of the message if that has not been sent.

        SDKs hide pings, and Claude Code gives up after 300 s, so after a long silence an empty part
        of a text block is sent instead.
        """
        block = self._blocks.open
        late = exchange.current().seconds >= _LATE and (block is None or block.kind == "text")
        if self._started and late:
            return self._events(self._blocks.add("text", ""))
        if self._started:
            return [{"type": "ping"}]
        self._started = True
        usage = _usage(Usage(prompt_tokens=prompt_tokens))
        start = {"type": "message_start", "message": self._message | {"usage": usage}}
        return [start, {"type": "ping"}]

    def take(self, event: Event) -> list[Json]:
        events: list[Json] = []
        if not self._started:
            events = self.beat(event.usage.prompt_tokens)
        if not isinstance(event, Progress):
            events += self._events(self._blocks.take(event))
        if isinstance(event, Done):
            events += self._end(event)
        return events

    def fail(self, error: ApiError) -> list[Json]:
        return [error_body(error)]

    def whole(self) -> Json:
        """Return the complete message, without a call that is incomplete."""
        content = [block for block in self._content if not isinstance(block.get("input"), str)]
        return self._message | {"content": content}

    def _events(self, steps: Iterable[Step]) -> list[Json]:
        events: list[Json] = []
        for step in steps:
            block, at = step.block, step.block.place
            kind, delta, field = _KINDS[block.kind]
            if step.verb == "begin":
                self._content.append(_begun(block))
                start = {"type": "content_block_start", "index": at, "content_block": _begun(block)}
                events.append(start)
            if step.verb == "end":
                self._content[at] = done = self._done(block)
                if kind == "thinking":
                    events.append(_delta(at, "signature_delta", "signature", done["signature"]))
                events.append({"type": "content_block_stop", "index": at})
            elif (step.text or kind == "text") and (kind != "thinking" or self._shows_thinking):
                events.append(_delta(at, delta, field, step.text))
        return events

    def _done(self, block: Block) -> Json:
        """Return a complete block. The signature contains thinking that is not shown."""
        text = block.text
        if block.kind == "reasoning":
            # Clients drop thinking without a signature.
            hidden, text = ("", text) if self._shows_thinking else (text, "")
            return _begun(block) | {"thinking": text, "signature": SEAL + hidden}
        if block.kind == "text":
            return _begun(block) | {"text": text}
        return _begun(block) | {"input": json.loads(text) if block.whole else text}

    def _end(self, done: Done) -> list[Json]:
        reason, sequence = _stop(self._request, done, bool(self._blocks.calls))
        usage = _usage(done.usage)
        delta: Json = {"stop_reason": reason, "stop_sequence": sequence}
        delta |= dict.fromkeys(("stop_details", "container"))
        self._message = self._message | delta | {"content": self._content, "usage": usage}
        return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]


def _begun(block: Block) -> Json:
    """Return a block without content, as the stream announces it."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": "", "citations": []}
    called = {"id": block.call.id, "name": block.call.name, "input": {}}
    return {"type": "tool_use", **called, "caller": {"type": "direct"}}


def _delta(index: int, kind: str, field: str, text: str) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: text}}


def _stop(request: MessagesRequest, done: Done, called: bool) -> tuple[str, str | None]:
    """Return why the message ended. A stop string from the model's file is the end of a turn."""
    if done.finish_reason == "length":
        full = done.usage.completion_tokens >= request.max_tokens
        return ("max_tokens" if full else "model_context_window_exceeded"), None
    if done.stop_sequence is not None and done.stop_sequence in (request.stop_sequences or ()):
        return "stop_sequence", done.stop_sequence
    return ("tool_use" if called else "end_turn"), None


def _usage(used: Usage) -> Json:
    """Return Anthropic's usage, in which cached prompt tokens are a separate count."""
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"thinking_tokens": used.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the error object; the message begins with the field at fault."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    described: Json = {"type": _ERRORS.get(error.status, other), "message": error.full_message}
    if error.param == "thread":  # for Anthropic's SDKs, which then send whole conversations
        described["details"] = {"error_code": "thread_unsupported_request"}
    request_id = exchange.current().request_id
    return {"type": "error", "error": described, "request_id": request_id}


ERRORS = ErrorForm(
    "AnthropicError", schema_of(type={"const": "error"}, error=_ERROR, request_id=TEXT), error_body
)
