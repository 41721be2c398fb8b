"""Answers of `/chat/completions`, in one piece and as a stream: `chat.completion` objects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

from gateway.blocks import Block, Blocks, Step, consume
from gateway.generation import Done, Event, Piece
from gateway.openai.answer_stream import AnswerStream
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.envelope import Json, usage_of
from gateway.openai.tools import CustomTool
from gateway.openai.tools_to_wire import is_legacy


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
        logprobs=wants_logprobs(request),
        usage=options is not None and options.include_usage is True,
        progress=request.return_progress is True,
    )


def wants_logprobs(request: ChatCompletionRequest) -> bool:
    """Return whether log-probabilities are requested; a number of 0 or below means no."""
    return request.logprobs is True or (request.logprobs or 0) > 0 or (request.n_probs or 0) > 0


def finish_reason(reason: str, *, called: bool, legacy: bool) -> str:
    """Return OpenAI's finish reason: a truncated call counts as length."""
    if reason == "stop" and called:
        return "function_call" if legacy else "tool_calls"
    return reason


def chat_logprobs(entries: Iterable[Json]) -> Json:
    """Return the backend's log-probabilities in OpenAI's form, which has no token ids."""
    return {"content": [token_logprob(entry) for entry in entries], "refusal": None}


def token_logprob(entry: Json) -> Json:
    """Return one log-probability in OpenAI's form."""
    names = ("token", "bytes", "logprob")
    others = entry.get("top_logprobs") or ()
    top = [{name: other[name] for name in names} for other in others]
    return {**{name: entry[name] for name in names}, "top_logprobs": top}


async def chat_completion(
    events: AsyncIterator[tuple[int, Event]], head: Json, form: ChatForm
) -> Json:
    answers = [Blocks(form.custom) for _ in range(form.choices)]
    logprobs: list[list[Json]] = [[] for _ in answers]
    async for index, event in events:
        if isinstance(event, Piece):  # now, because thousands at once would stop all streams
            logprobs[index] += map(token_logprob, event.logprobs)
        consume(answers[index], event)
    pairs = enumerate(zip(answers, logprobs, strict=True))
    choices = [_choice(index, *pair, form) for index, pair in pairs]
    usage = usage_of([each.done.usage for each in answers if each.done], form.choices)
    return {**head, "choices": choices, "usage": usage}


def _choice(index: int, answer: Blocks, logprobs: list[Json], form: ChatForm) -> Json:
    assert answer.done is not None
    reason, called = answer.done.finish_reason, bool(answer.calls)
    return {
        "index": index,
        "message": _message(answer, answer.calls, form),
        "logprobs": {"content": logprobs, "refusal": None} if form.logprobs else None,
        "finish_reason": finish_reason(reason, called=called, legacy=form.legacy),
    }


def _message(answer: Blocks, calls: list[Block], form: ChatForm) -> Json:
    message: Json = {
        "role": "assistant",
        "content": answer.text_of("text") or (None if calls else ""),
        "refusal": None,
        "annotations": [],
    }
    if form.reasoning and (reasoning := answer.text_of("reasoning")):
        message["reasoning_content"] = reasoning
    if calls and form.legacy:
        message["function_call"] = called(calls[0], calls[0].text)
    elif calls:
        message["tool_calls"] = [
            {"id": block.call.id, **typed(block, block.text, first=True)} for block in calls
        ]
    return message


def typed(block: Block, text: str, *, first: bool) -> Json:
    """Return a part of a call; only the first has type and name."""
    kind = "custom" if block.custom else "function"
    return {**({"type": kind} if first else {}), kind: called(block, text, first=first)}


def called(block: Block, text: str, *, first: bool = True) -> Json:
    """Return the function or the custom tool of a call."""
    named = {"name": block.call.name} if first else {}
    return named | {"input" if block.custom else "arguments": text}


def chat_stream(head: Json, form: ChatForm) -> AnswerStream:
    choices = [_Streamed(index, form) for index in range(form.choices)]
    return AnswerStream(
        head, choices, usage=form.usage, progress=form.progress, per_prompt=form.choices
    )


class _Streamed:
    """One answer of the stream: a chunk with the role, deltas, a chunk with the finish reason."""

    def __init__(self, index: int, form: ChatForm) -> None:
        self._index = index
        self._form = form
        self._begun = False
        self._blocks = Blocks(form.custom)
        self._logprobs: list[Json] = []

    def begin(self) -> list[Json]:
        """Return the item for the first chunk; empty if it has been sent."""
        if self._begun:
            return []
        self._begun = True
        return [self.nothing({"role": "assistant", "content": ""})]

    def nothing(self, delta: Json | None = None) -> Json:
        """Return an item that adds nothing to the answer."""
        return {"index": self._index, "delta": delta or {}, "logprobs": None, "finish_reason": None}

    def chunks(self, event: Piece | Done) -> Iterator[Json]:
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

    def _choice(self, delta: Json, reason: str | None) -> Json:
        logprobs = None
        if self._form.logprobs and self._logprobs:
            logprobs = chat_logprobs(self._logprobs)
            self._logprobs = []
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

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
