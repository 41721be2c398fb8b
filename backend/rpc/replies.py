"""Converts chat events to Replies, in the one form that every endpoint of LocalAI reads correctly.

Content is sent both as `message` and as a delta. Reasoning and tool calls are sent only as deltas,
because LocalAI parses `message` for markup again. Nothing is repeated. Counts and times are running
totals on every Reply, because LocalAI uses those of the last Reply, which has only totals.
"""

from __future__ import annotations

import json

from backend.engine.events import Progress, Usage
from common.chat_events import (
    ChatEvent,
    ChatMessage,
    Content,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
)
from wire import backend_pb2 as pb

_REPLACEMENT = "\ufffd"


def piece(event: ChatEvent, usage: Usage, logprobs: bytes = b"") -> pb.Reply:
    reply = last(usage, logprobs)
    match event:
        case Content(text):
            _add_content(reply, text)
        case Reasoning(text):
            reply.chat_deltas.add(reasoning_content=text)
        case ToolCallStart(index, identity, name):
            reply.chat_deltas.add().tool_calls.add(index=index, id=identity, name=name)
        case ToolCallArguments(index, text):
            reply.chat_deltas.add().tool_calls.add(index=index, arguments=text)
    return reply


def last(usage: Usage, logprobs: bytes = b"") -> pb.Reply:
    """Return the last Reply of a stream: the final totals, and the log-probabilities."""
    return pb.Reply(
        logprobs=logprobs,
        tokens=usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens,
        timing_prompt_processing=usage.prefill_ms,
        timing_token_generation=usage.decode_ms,
    )


def progress(event: Progress) -> pb.Reply:
    counts = {
        "total": event.usage.prompt_tokens,
        "cached": event.usage.cached_tokens,
        "processed": event.processed,
    }
    return last(event.usage, json.dumps({"progress": counts}).encode())


def unary(message: ChatMessage, usage: Usage, logprobs: bytes = b"") -> pb.Reply:
    """Return the one Reply of a unary call, without calls that the model did not finish.

    Their text is in the content, and many clients fail on arguments that are not valid JSON.
    """
    reply = last(usage, logprobs)
    _add_content(reply, message.content)
    delta = reply.chat_deltas[0]
    delta.reasoning_content = message.reasoning_content
    for call in filter(_is_whole, message.tool_calls):
        delta.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    return reply


def _is_whole(call: ToolCall) -> bool:
    try:
        json.loads(call.arguments)
    except ValueError:
        return False
    return True


def _add_content(reply: pb.Reply, text: str) -> None:
    # LocalAI stops reading a stream at the first U+FFFD in `message`, but not in a delta.
    reply.message = text.replace(_REPLACEMENT, "?").encode()
    reply.chat_deltas.add(content=text)
