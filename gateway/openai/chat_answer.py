"""The options of a chat answer, and the answer in one piece: `chat.completion`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Any

from gateway.generation import Done, Event, Piece, ToolCallPiece, WholeAnswer
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.envelope import usage_of
from gateway.openai.tools import CustomTool
from gateway.openai.tools_to_wire import is_legacy
from gateway.text_input import TextInput


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Options of the answer's form.

    legacy: calls as function_call. custom: the names of tools that take text. usage: a stream ends
    with a usage chunk. progress: a stream reports prefilled parts of the prompt, as llama.cpp does.
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
    """Whether log-probabilities are requested; a number of 0 or below means no."""
    return request.logprobs is True or (request.logprobs or 0) > 0 or (request.n_probs or 0) > 0


def finish_reason(reason: str, *, called: bool, legacy: bool) -> str:
    """OpenAI's finish reason: a truncated call counts as length."""
    if reason == "stop" and called:
        return "function_call" if legacy else "tool_calls"
    return reason


def chat_logprobs(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The backend's entries in OpenAI's form, which has no token ids."""
    return {"content": [token_logprob(entry) for entry in entries], "refusal": None}


def token_logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """One entry in OpenAI's form."""
    names = ("token", "bytes", "logprob")
    others = entry.get("top_logprobs") or ()
    top = [{name: other[name] for name in names} for other in others]
    return {**{name: entry[name] for name in names}, "top_logprobs": top}


Json = dict[str, Any]


async def chat_completion(
    events: AsyncIterator[tuple[int, Event]], head: Json, form: ChatForm
) -> Json:
    answers = [WholeAnswer() for _ in range(form.choices)]
    async for index, event in events:
        if isinstance(event, Piece):  # now, because thousands at once would stop all streams
            event = replace(event, logprobs=tuple(map(token_logprob, event.logprobs)))
        answers[index].take(event)
    ends = [answer.done for answer in answers if answer.done is not None]
    pairs = enumerate(zip(answers, ends, strict=True))
    choices = [_choice(index, *pair, form) for index, pair in pairs]
    usage = usage_of([end.usage for end in ends], form.choices)
    return {**head, "choices": choices, "usage": usage}


def _choice(index: int, answer: WholeAnswer, end: Done, form: ChatForm) -> Json:
    calls = answer.calls()
    return {
        "index": index,
        "message": _message(answer, calls, form),
        "logprobs": {"content": answer.logprobs, "refusal": None} if form.logprobs else None,
        "finish_reason": finish_reason(end.finish_reason, called=bool(calls), legacy=form.legacy),
    }


def _message(answer: WholeAnswer, calls: list[ToolCallPiece], form: ChatForm) -> Json:
    message: Json = {
        "role": "assistant",
        "content": answer.content or (None if calls else ""),
        "refusal": None,
        "annotations": [],
    }
    if form.reasoning and answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls and form.legacy:
        message["function_call"] = _function(calls[0])
    elif calls:
        message["tool_calls"] = [_call(call, form) for call in calls]
    return message


def _call(call: ToolCallPiece, form: ChatForm) -> Json:
    if call.name not in form.custom:
        return {"id": call.id, "type": "function", "function": _function(call)}
    text = TextInput()
    custom = {"name": call.name, "input": text.add(call.arguments) + text.rest()}
    return {"id": call.id, "type": "custom", "custom": custom}


def _function(call: ToolCallPiece) -> Json:
    return {"name": call.name, "arguments": call.arguments}
