"""Writes Replies in the one form that every endpoint of LocalAI reads correctly, and trailers.

Content is sent both as `message` and as a delta. Reasoning and tool calls are sent only as deltas,
because LocalAI parses `message` for markup again. Nothing is repeated. Counts and times are running
totals on every Reply, because LocalAI uses those of the last Reply, which has only totals.

Values for which the protocol has no field are trailing metadata, which hosts may ignore: why an
answer ended, how many prompt tokens came from the cache and how many answer tokens were reasoning;
for Status and GetMetrics the results of drafting and the use of experts in files, and for Status
the ranks. Only successful calls have trailing metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from backend.engine.engine_state import Gauges
from backend.engine.events import Finished, Progress, PromptLogprobs, TokenLogprob, Usage
from backend.engine.token_text import TextStream
from common.chat_events import (
    ChatEvent,
    ChatMessage,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    is_whole,
)
from wire import backend_pb2 as pb

_REPLACEMENT = "\ufffd"
LEAST = -9999.0  # OpenAI's value for a probability of zero, whose logarithm JSON cannot represent
BytesOf = Callable[[int], bytes]
CONTEXT_SIZE = "mlx-context-size"  # LoadModel: tokens of prompt and answer
CONTEXT_REASON = "mlx-context-reason"  # LoadModel: why they are fewer than the model's own
TRUNCATED_TOKENS = "mlx-truncated-tokens"  # Embedding and Rerank; absent if none was cut off
_UNPRINTABLE = re.compile("[^ -~]")


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
    for call in message.tool_calls:
        if is_whole(call.arguments):
            delta.tool_calls.add(
                index=call.index, id=call.id, name=call.name, arguments=call.arguments
            )
    return reply


def _add_content(reply: pb.Reply, text: str) -> None:
    # LocalAI stops reading a stream at the first U+FFFD in `message`, but not in a delta.
    reply.message = text.replace(_REPLACEMENT, "?").encode()
    reply.chat_deltas.add(content=text)


def logprobs_json(
    entries: Sequence[TokenLogprob],
    bytes_of: BytesOf,
    prompt: PromptLogprobs | None = None,
    text: TextStream | None = None,
) -> bytes:
    """Return `{"content": […]}` with one item per generated token, and `"prompt"` if requested.

    bytes_of: the bytes of a token.
    text: a new decoder, for the texts of the prompt's tokens.
    """
    shown: dict[str, Any] = {"content": [_entry(entry, bytes_of) for entry in entries]}
    if prompt is not None and text is not None:
        shown["prompt"] = list(_of_prompt(prompt, bytes_of, text))
    return json.dumps(shown, ensure_ascii=False).encode()


def _of_prompt(
    prompt: PromptLogprobs, bytes_of: BytesOf, text: TextStream
) -> Iterator[dict[str, Any]]:
    """Yield one item per token; their texts concatenated give the prompt."""
    unknown: dict[str, Any] = {"logprob": None, "top_logprobs": []}
    first = _token(prompt.first, bytes_of) | unknown
    entries = [first, *(_entry(entry, bytes_of) for entry in prompt.rest)]
    for count, entry in enumerate(entries, 1):
        written = text.add(entry["id"])
        yield entry | {"text": written + text.finish() if count == len(entries) else written}


def _entry(entry: TokenLogprob, bytes_of: BytesOf) -> dict[str, Any]:
    top = [_with_value(token, value, bytes_of) for token, value in entry.top]
    return _with_value(entry.token, entry.logprob, bytes_of) | {"top_logprobs": top}


def _with_value(token: int, value: float, bytes_of: BytesOf) -> dict[str, Any]:
    return _token(token, bytes_of) | {"logprob": max(value, LEAST)}


def _token(token: int, bytes_of: BytesOf) -> dict[str, Any]:
    written = bytes_of(token)
    return {
        "id": token,
        # Bytes that are only part of a character are shown as escapes, so nothing is lost.
        "token": written.decode(errors="backslashreplace"),
        "bytes": list(written),
    }


def trailers(end: Finished, reasoning_tokens: int) -> tuple[tuple[str, str | bytes], ...]:
    found: list[tuple[str, str | bytes]] = [
        ("mlx-finish-reason", end.reason),
        ("mlx-cached-tokens", str(end.usage.cached_tokens)),
        ("mlx-reasoning-tokens", str(reasoning_tokens)),
    ]
    if end.stop_sequence:
        found.append(("mlx-stop-sequence-bin", end.stop_sequence.encode()))
    if end.repeated:
        found.append(("mlx-ended-by", "repetition"))
    return tuple(found)


def metrics_trailers(metrics: Gauges) -> tuple[tuple[str, str], ...]:
    """Return the trailers of Status and GetMetrics about drafting, and about experts in files."""
    drafting, experts = metrics.drafting, metrics.experts
    of_drafting = drafting and (
        ("mlx-draft-width", str(drafting.width)),
        ("mlx-draft-tokens", str(drafting.proposed)),
        ("mlx-draft-accepted-tokens", str(drafting.accepted)),
        ("mlx-draft-gain", f"{drafting.gain:.2f}"),
        ("mlx-drafters", drafting.drafters),
    )
    of_experts = experts and (
        ("mlx-expert-slots", str(experts.slots)),
        ("mlx-expert-hits", str(experts.hits)),
        ("mlx-expert-misses", str(experts.misses)),
        ("mlx-expert-ahead-hits", str(experts.ahead_hits)),
        ("mlx-expert-read-bytes", str(experts.read_bytes)),
        ("mlx-expert-wasted-bytes", str(experts.wasted_bytes)),
        ("mlx-expert-wait-seconds", f"{experts.wait_seconds:.6f}"),
    )
    return (*(of_drafting or ()), *(of_experts or ()))


def rank_trailers(lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the trailers of Status about ranks. gRPC sends only printable ASCII in them."""
    return tuple(("mlx-rank", _UNPRINTABLE.sub("?", line)) for line in lines)
