"""A whole chat answer: `chat.completion`, when all of its choices have ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from gateway.generation import Done, Event, ToolCallPiece, WholeAnswer
from gateway.openai.chat_form import ChatForm, chat_logprobs, finish_reason
from gateway.openai.envelope import usage_of

Json = dict[str, Any]


async def chat_completion(
    events: AsyncIterator[tuple[int, Event]], head: Json, form: ChatForm
) -> Json:
    answers = [WholeAnswer() for _ in range(form.choices)]
    async for index, event in events:
        answers[index].take(event)
    ends = [answer.done for answer in answers if answer.done is not None]
    choices = [
        _choice(index, answer, end, form)
        for index, (answer, end) in enumerate(zip(answers, ends, strict=True))
    ]
    usage = usage_of([end.usage for end in ends], form.choices)
    return {**head, "choices": choices, "usage": usage}


def _choice(index: int, answer: WholeAnswer, end: Done, form: ChatForm) -> Json:
    calls = answer.calls()
    return {
        "index": index,
        "message": _message(answer, calls, form),
        "logprobs": chat_logprobs(answer.logprobs) if form.logprobs else None,
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
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call)} for call in calls
        ]
    return message


def _function(call: ToolCallPiece) -> Json:
    return {"name": call.name, "arguments": call.arguments}
