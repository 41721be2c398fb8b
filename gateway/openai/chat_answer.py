"""The options of a chat answer, and the answer in one piece: `chat.completion`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from gateway.blocks import Block, Blocks, consume
from gateway.generation import Event, Piece
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.envelope import usage_of
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


def chat_logprobs(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the backend's log-probabilities in OpenAI's form, which has no token ids."""
    return {"content": [token_logprob(entry) for entry in entries], "refusal": None}


def token_logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """Return one log-probability in OpenAI's form."""
    names = ("token", "bytes", "logprob")
    others = entry.get("top_logprobs") or ()
    top = [{name: other[name] for name in names} for other in others]
    return {**{name: entry[name] for name in names}, "top_logprobs": top}


Json = dict[str, Any]


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
