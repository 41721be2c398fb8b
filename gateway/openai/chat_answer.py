"""The choices of answers of `/chat/completions`: `chat.completion` objects and chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway.blocks import Block, Blocks, Step, consume
from gateway.generation import Done, Piece
from gateway.openai.answer import Json, OpenAIAnswer
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.tools import CustomTool, is_legacy


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Options of the answer's form.

    legacy: whether calls are written as function_call.
    custom: the names of tools that accept plain text.
    usage: whether a stream ends with a usage chunk.
    progress: whether a stream reports prefilled parts of the prompt, as llama.cpp does.
    """

    choices: int = 1
    legacy: bool = False
    custom: frozenset[str] = frozenset()
    reasoning: bool = True
    logprobs: bool = False
    usage: bool = False
    progress: bool = False


def form_of(request: ChatCompletionRequest) -> ChatForm:
    options = request.stream_options
    return ChatForm(
        choices=request.n or 1,
        legacy=is_legacy(request),
        custom=frozenset(t.custom.name for t in request.tools or () if isinstance(t, CustomTool)),
        reasoning=request.include_reasoning is not False,
        logprobs=request.wants_logprobs,
        usage=options is not None and options.include_usage is True,
        progress=request.return_progress is True,
    )


def finish_reason(reason: str, *, called: bool, legacy: bool) -> str:
    """Return OpenAI's finish reason: a truncated call counts as length."""
    if reason == "stop" and called:
        return "function_call" if legacy else "tool_calls"
    return reason


def _logprobs(entries: Iterable[Json]) -> Json:
    return {"content": [*entries], "refusal": None}


def token_logprob(entry: Json) -> Json:
    """Return one of the backend's log-probabilities in OpenAI's form, which has no token ids."""
    names = ("token", "bytes", "logprob")
    others = entry.get("top_logprobs") or ()
    top = [{name: other[name] for name in names} for other in others]
    return {**{name: entry[name] for name in names}, "top_logprobs": top}


def typed(block: Block, text: str, *, first: bool) -> Json:
    """Return a part of a call; only the first has type and name."""
    kind = "custom" if block.custom else "function"
    return {**({"type": kind} if first else {}), kind: called(block, text, first=first)}


def called(block: Block, text: str, *, first: bool = True) -> Json:
    named = {"name": block.call.name} if first else {}
    return named | {"input" if block.custom else "arguments": text}


def chat_answer(head: Json, form: ChatForm) -> OpenAIAnswer:
    choices = [_Choice(index, form) for index in range(form.choices)]
    return OpenAIAnswer(
        head, choices, usage=form.usage, progress=form.progress, per_prompt=form.choices
    )


class _Choice:
    """One answer. A stream has a chunk with the role, deltas, and one with the finish reason."""

    def __init__(self, index: int, form: ChatForm) -> None:
        self._index = index
        self._form = form
        self._begun = False
        self._blocks = Blocks(form.custom)
        self._logprobs: list[Json] = []  # those that no chunk has

    def begin(self) -> list[Json]:
        if self._begun:
            return []
        self._begun = True
        return [self._part({"role": "assistant", "content": ""})]

    def nothing(self) -> Json:
        return self._part({})

    def add(self, event: Piece | Done) -> None:
        self._note(event)
        consume(self._blocks, event)

    def _note(self, event: Piece | Done) -> None:
        if isinstance(event, Piece) and self._form.logprobs:
            self._logprobs += map(token_logprob, event.logprobs)

    def chunks(self, event: Piece | Done) -> Iterator[Json]:
        self._note(event)
        for step in self._blocks.take(event):
            if delta := self._delta(step):
                yield self._part(delta, self._unsent())
        if isinstance(event, Done):
            yield self._part({}, self._unsent(), self._reason(event))

    def whole(self) -> Json:
        assert self._blocks.done is not None
        return {
            "index": self._index,
            "message": self._message(),
            "logprobs": _logprobs(self._logprobs) if self._form.logprobs else None,
            "finish_reason": self._reason(self._blocks.done),
        }

    def _part(self, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _unsent(self) -> Json | None:
        unsent, self._logprobs = self._logprobs, []
        return _logprobs(unsent) if unsent else None

    def _reason(self, end: Done) -> str:
        called = bool(self._blocks.calls)
        return finish_reason(end.finish_reason, called=called, legacy=self._form.legacy)

    def _message(self) -> Json:
        answer, calls = self._blocks, self._blocks.calls
        message: Json = {
            "role": "assistant",
            "content": answer.text_of("text") or (None if calls else ""),
            "refusal": None,
            "annotations": [],
        }
        if self._form.reasoning and (reasoning := answer.text_of("reasoning")):
            message["reasoning_content"] = reasoning
        if calls and self._form.legacy:
            message["function_call"] = called(calls[0], calls[0].text)
        elif calls:
            message["tool_calls"] = [
                {"id": block.call.id, **typed(block, block.text, first=True)} for block in calls
            ]
        return message

    def _delta(self, step: Step) -> Json:
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
