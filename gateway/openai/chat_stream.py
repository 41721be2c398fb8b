"""A streamed chat answer: `chat.completion.chunk` events, in the order that clients expect.

Per choice: one chunk with the role, deltas, one chunk with the finish reason. After all choices
the usage, if it was asked for, and `[DONE]`. A failure is raised: it is no finish reason.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from gateway.generation import Done, Event, Piece, ToolCallPiece, is_whole
from gateway.openai.chat_form import ChatForm, chat_logprobs, finish_reason
from gateway.openai.chunks import ChunkWriter
from gateway.openai.identity import Identity
from gateway.openai.usage import usage_of
from gateway.sse import DONE

Delta = dict[str, Any]


async def chat_chunks(
    events: AsyncIterator[tuple[int, Event]], identity: Identity, form: ChatForm
) -> AsyncGenerator[str, None]:
    """The events of the stream."""
    writer = ChunkWriter("chat.completion.chunk", identity, with_usage=form.usage)
    choices = [_Choice(index, form) for index in range(form.choices)]
    ends: dict[int, Done] = {}
    async for index, event in events:
        if isinstance(event, Done):
            ends[index] = event
        for chunk in choices[index].chunks(event):
            yield writer.chunk(chunk)
    if form.usage:
        usages = [ends[index].usage for index in sorted(ends)]
        yield writer.usage(usage_of(usages, form.choices))
    yield DONE


class _Choice:
    """One answer of the stream: what has been said of it, and what waits for the next chunk."""

    def __init__(self, index: int, form: ChatForm) -> None:
        self._index = index
        self._form = form
        self._begun = False
        self._calls: dict[int, list[str]] = {}  # the arguments of those whose name has been told
        self._logprobs: list[dict[str, Any]] = []

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        """The choices of the chunks that an event becomes."""
        if isinstance(event, Piece):
            self._logprobs.extend(event.logprobs)
            deltas = list(self._deltas(event))
            if deltas and not self._begun:
                yield from self._opening(
                    only_calls="content" not in deltas[0] and "reasoning_content" not in deltas[0]
                )
            for delta in deltas:
                yield self._choice(delta, None)
            return
        if not self._begun:
            yield from self._opening(only_calls=False)
        called = any(is_whole("".join(texts)) for texts in self._calls.values())
        reason = finish_reason(event.finish_reason, called=called, legacy=self._form.legacy)
        yield self._choice({}, reason)

    def _opening(self, *, only_calls: bool) -> Iterator[dict[str, Any]]:
        self._begun = True
        content = None if only_calls else ""
        yield {
            "index": self._index,
            "delta": {"role": "assistant", "content": content},
            "logprobs": None,
            "finish_reason": None,
        }

    def _choice(self, delta: Delta, reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._form.logprobs and self._logprobs:
            logprobs = chat_logprobs(self._logprobs)
            self._logprobs = []
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _deltas(self, piece: Piece) -> Iterator[Delta]:
        if piece.reasoning and self._form.reasoning:
            yield {"reasoning_content": piece.reasoning}
        if piece.content:
            yield {"content": piece.content}
        for part in piece.tool_calls:
            yield self._call(part)

    def _call(self, part: ToolCallPiece) -> Delta:
        """A part of a call: index always, id, type and name with its first."""
        function = {"arguments": part.arguments}
        first = part.index not in self._calls
        self._calls.setdefault(part.index, []).append(part.arguments)
        if first:
            function = {"name": part.name, "arguments": part.arguments}
        if self._form.legacy:
            return {"function_call": function}
        named = {"id": part.id, "type": "function"} if first else {}
        return {"tool_calls": [{"index": part.index, **named, "function": function}]}
