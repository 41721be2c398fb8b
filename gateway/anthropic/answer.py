"""Builds an Anthropic message, as one object or as the events of a stream.

Content blocks follow each other: thinking, text, and one block for each call. How much of a prompt
was cached is known only at the end, so `message_start` counts the complete prompt as uncached, and
`message_delta` separates the two.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from gateway import exchange
from gateway.anthropic.request import MessagesRequest
from gateway.generation import Done, Event, Progress, ToolCallPiece, Usage, is_whole
from gateway.openai.anthropic_parts import SEAL

Json = dict[str, Any]
_TEXT: Json = {"type": "text", "text": "", "citations": []}
_LATE = 60.0  # seconds


class Answer:
    """The message so far. Pass every event of the generation to `take`, in order."""

    def __init__(self, request: MessagesRequest, model: str) -> None:
        self._request = request
        self._shows_thinking = getattr(request.thinking, "display", None) != "omitted"
        self._content: list[Json] = []
        self._open: str | int | None = None  # kind of the open block, or the index of its call
        self._parts: list[str] = []
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
        """A ping, after the start of the message if that has not been sent.

        SDKs hide pings, and Claude Code gives up after 300 s, so a long silence begins a text.
        """
        late = exchange.current().seconds >= _LATE
        if self._started and not (late and self._open in (None, "text")):
            return [{"type": "ping"}]
        if self._started:
            return [*self._switch("text", dict(_TEXT)), *self._grow("text_delta", "text", "")]
        self._started = True
        usage = _usage(Usage(prompt_tokens=prompt_tokens))
        start = {"type": "message_start", "message": self._message | {"usage": usage}}
        return [start, {"type": "ping"}]

    def take(self, event: Event) -> list[Json]:
        """The stream's events for an event of the generation."""
        events: list[Json] = []
        if not self._started:
            counted = event.usage.prompt_tokens if isinstance(event, Done) else event.prompt_tokens
            events = self.beat(counted)
        if isinstance(event, Progress):
            return events
        if isinstance(event, Done):
            return events + self._end(event)
        if event.reasoning:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            events += self._switch("thinking", block)
            shown = self._shows_thinking
            events += self._grow("thinking_delta", "thinking", event.reasoning, shown)
        if event.content:
            events += self._switch("text", dict(_TEXT))
            events += self._grow("text_delta", "text", event.content)
        for call in event.tool_calls:
            events += self._call(call)
        return events

    def message(self) -> Json:
        """The complete message, available after Done, without a call that was not completed."""
        content = [block for block in self._content if not isinstance(block.get("input"), str)]
        return self._message | {"content": content}

    def _call(self, call: ToolCallPiece) -> list[Json]:
        block = {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": {},
            "caller": {"type": "direct"},
        }
        events = self._switch(call.index, block)
        if call.arguments:
            events += self._grow("input_json_delta", "partial_json", call.arguments)
        return events

    def _switch(self, kind: str | int, block: Json) -> list[Json]:
        """End the open block and begin another, if the next part belongs to another block."""
        if self._open == kind:
            return []
        events = self._close()
        self._open = kind
        self._content.append(block)
        index = len(self._content) - 1
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        return events

    def _grow(self, kind: str, field: str, text: str, shown: bool = True) -> list[Json]:
        self._parts.append(text)
        if not shown:
            return []
        delta = {"type": kind, field: text}
        return [{"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}]

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        index = len(self._content) - 1
        events: list[Json] = []
        # A new object, because the one that began the block has been returned in an event.
        block = self._content[index].copy()
        text = "".join(self._parts)
        if block["type"] == "thinking":
            # Clients drop thinking without a signature. Hidden thinking is in its signature.
            hidden, text = ("", text) if self._shows_thinking else (text, "")
            block["signature"] = SEAL + hidden
            delta = {"type": "signature_delta", "signature": block["signature"]}
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
        if block["type"] == "tool_use":
            block["input"] = json.loads(text) if is_whole(text) else text
        else:
            block[block["type"]] = text
        self._content[index] = block
        self._open, self._parts = None, []
        return [*events, {"type": "content_block_stop", "index": index}]

    def _end(self, done: Done) -> list[Json]:
        events = self._close()
        called = any(isinstance(block.get("input"), dict) for block in self._content)
        reason, sequence = _stop(self._request, done, called)
        usage = _usage(done.usage)
        delta: Json = {"stop_reason": reason, "stop_sequence": sequence}
        delta |= dict.fromkeys(("stop_details", "container"))
        self._message = self._message | delta | {"content": self._content, "usage": usage}
        events.append({"type": "message_delta", "delta": delta, "usage": usage})
        events.append({"type": "message_stop"})
        return events


def _stop(request: MessagesRequest, done: Done, called: bool) -> tuple[str, str | None]:
    """Why the message ended. A stop string from the model's file counts as the end of turn."""
    if done.finish_reason == "length":
        full = done.usage.completion_tokens >= request.max_tokens
        return ("max_tokens" if full else "model_context_window_exceeded"), None
    if done.stop_sequence is not None and done.stop_sequence in (request.stop_sequences or ()):
        return "stop_sequence", done.stop_sequence
    return ("tool_use" if called else "end_turn"), None


def _usage(used: Usage) -> Json:
    """Anthropic's usage: prompt tokens that were cached are counted separately."""
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
