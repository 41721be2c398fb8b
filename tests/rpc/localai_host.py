"""How LocalAI (commit 82c191afa) turns replies into what its client sees.

Only the rules that can damage an answer are modelled: it stops at a replacement character, moves
reasoning tags out of `message`, prefers deltas once it has seen any, searches `message` for tool
calls, merges deltas by index, and repeats requests that had an empty answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wire import backend_pb2 as pb

_MARKUP = re.compile(r"<tool_call>|<function=|<\|python_tag\|>|\[TOOL_CALLS\]")


@dataclass
class Seen:
    """What the client received.

    `invented`: calls that the host found in text, always a corruption.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    invented: bool = False
    empty_chunks: int = 0
    retried: bool = False
    tokens: int = 0


@dataclass
class _Callback:
    text: str
    deltas: Sequence[pb.ChatDelta]


def streamed(replies: Iterable[pb.Reply], *, tools: bool) -> Seen:
    """A streaming chat completion, with or without tools in the request."""
    seen = Seen()
    received = list(replies)
    callbacks = list(_callbacks(received))
    accumulated, extracted = "", ("", "")
    deltas_win = False
    for callback in callbacks:
        accumulated += callback.text
        content = "".join(delta.content for delta in callback.deltas)
        thought = "".join(delta.reasoning_content for delta in callback.deltas)
        deltas_win |= bool(thought) or (tools and bool(content))
        before, extracted = extracted, _extract(accumulated)
        if not deltas_win:
            content = extracted[0][len(before[0]) :]
            thought = extracted[1][len(before[1]) :]
        seen.content += content
        seen.reasoning += thought
        seen.empty_chunks += not content and not thought
        if tools and not any(delta.tool_calls for delta in callback.deltas):
            seen.invented |= _looks_like_call(accumulated)
    _conclude(seen, received)
    return seen


def unary(reply: pb.Reply, *, tools: bool) -> Seen:
    """A chat completion in one piece."""
    seen = Seen()
    deltas = reply.chat_deltas
    if any(delta.content or delta.reasoning_content or delta.tool_calls for delta in deltas):
        seen.content = "".join(delta.content for delta in deltas)
        seen.reasoning = "".join(delta.reasoning_content for delta in deltas)
        if not seen.reasoning:
            seen.content, seen.reasoning = _extract(seen.content)
    else:
        seen.content, seen.reasoning = _extract(reply.message.decode())
    _conclude(seen, [reply])
    if tools and not seen.calls:
        seen.invented = _looks_like_call(reply.message.decode())
    return seen


def _callbacks(replies: Iterable[pb.Reply]) -> Iterable[_Callback]:
    """One callback per reply with whole characters or no text; a U+FFFD drops the rest."""
    pending = b""
    for reply in replies:
        pending += reply.message
        text = pending.decode("utf-8", "replace")
        whole = text.partition("\ufffd")[0]
        pending = pending[len(whole.encode()) :]
        if whole or not reply.message:
            yield _Callback(whole, reply.chat_deltas)


def _extract(text: str) -> tuple[str, str]:
    """The host's own reasoning tags; one without an end takes everything after it."""
    before, opening, rest = text.partition("<think>")
    if not opening:
        return text, ""
    thought, _, after = rest.partition("</think>")
    return before + after, thought


def _looks_like_call(text: str) -> bool:
    if _MARKUP.search(text):
        return True
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            return True
    return False


def _conclude(seen: Seen, replies: Sequence[pb.Reply]) -> None:
    """Merge calls by index, take the last totals, and decide whether to repeat the request."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    deltas = [delta for reply in replies for delta in reply.chat_deltas]
    for call in (call for delta in deltas for call in delta.tool_calls):
        names[call.index] = call.name or names.get(call.index, "")
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    seen.calls = [(names[index], arguments[index]) for index in sorted(names)]
    content = b"".join(reply.message for reply in replies).strip()
    seen.retried = not content and not any(delta.content or delta.tool_calls for delta in deltas)
    seen.tokens = replies[-1].tokens
