"""Events of a generation → Reply, in the one form that every endpoint of the host reads right.

Contract 4.9: content travels both as `message` and as a delta, counts and times are running
totals on every Reply because the host overwrites them with each, and the last one says nothing
but the totals.
"""

from __future__ import annotations

from backend.engine.events import TextDelta, Usage
from wire import backend_pb2 as pb

_REPLACEMENT = "\ufffd"


def piece(delta: TextDelta) -> pb.Reply:
    """The next piece of a stream."""
    return _reply(_safe(delta.text), delta.usage)


def last(usage: Usage) -> pb.Reply:
    """The end of a stream: the final totals."""
    return pb.Reply(
        tokens=usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens,
        timing_prompt_processing=usage.prefill_ms,
        timing_token_generation=usage.decode_ms,
    )


def whole(pieces: list[str], usage: Usage) -> pb.Reply:
    """The one Reply of a unary call."""
    return _reply(_safe("".join(pieces)), usage)


def _reply(text: str, usage: Usage) -> pb.Reply:
    reply = last(usage)
    reply.message = text.encode()
    reply.chat_deltas.add(content=text)
    return reply


def _safe(text: str) -> str:
    """The host stops reading a stream for good at the first U+FFFD in `message` (4.1.1)."""
    return text.replace(_REPLACEMENT, "?")
