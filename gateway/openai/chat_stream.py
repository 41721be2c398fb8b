"""A streamed chat answer: `chat.completion.chunk` events, in the order that clients expect.

Per choice: one chunk with the role, deltas, one chunk with the finish reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.blocks import Blocks, Step
from gateway.generation import Done, Piece
from gateway.openai.answer_stream import AnswerStream
from gateway.openai.chat_answer import ChatForm, called, chat_logprobs, finish_reason, typed
from gateway.openai.envelope import Json

Delta = dict[str, Any]


def chat_stream(head: Json, form: ChatForm) -> AnswerStream:
    choices = [_Choice(index, form) for index in range(form.choices)]
    return AnswerStream(
        head, choices, usage=form.usage, progress=form.progress, per_prompt=form.choices
    )


class _Choice:
    """One answer of the stream: what was sent, and what waits for the next chunk."""

    def __init__(self, index: int, form: ChatForm) -> None:
        self._index = index
        self._form = form
        self._begun = False
        self._blocks = Blocks(form.custom)
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> list[dict[str, Any]]:
        """Return the item for the first chunk; empty if it has been sent."""
        if self._begun:
            return []
        self._begun = True
        return [self.nothing({"role": "assistant", "content": ""})]

    def nothing(self, delta: Delta | None = None) -> dict[str, Any]:
        """Return an item that adds nothing to the answer."""
        return {"index": self._index, "delta": delta or {}, "logprobs": None, "finish_reason": None}

    def chunks(self, event: Piece | Done) -> Iterator[dict[str, Any]]:
        if isinstance(event, Piece):
            self._logprobs.extend(event.logprobs)
        for step in self._blocks.take(event):
            if delta := self._delta(step):
                yield self._choice(delta, None)
        if isinstance(event, Done):
            reason = finish_reason(
                event.finish_reason, called=bool(self._blocks.calls), legacy=self._form.legacy
            )
            yield self._choice({}, reason)

    def _choice(self, delta: Delta, reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._form.logprobs and self._logprobs:
            logprobs = chat_logprobs(self._logprobs)
            self._logprobs = []
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _delta(self, step: Step) -> Delta:
        """Return what a step adds; empty if nothing."""
        block, first = step.block, step.verb == "begin"
        if step.verb == "end" and not step.text:
            return {}
        if block.kind != "call":
            shown = block.kind == "text" or self._form.reasoning
            name = "content" if block.kind == "text" else "reasoning_content"
            return {name: step.text} if shown else {}
        if self._form.legacy:
            return {"function_call": called(block, step.text, first=first)}
        call = {"index": block.call.index, **({"id": block.call.id} if first else {})}
        return {"tool_calls": [call | typed(block, step.text, first=first)]}
