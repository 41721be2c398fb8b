"""A whole chat answer: `chat.completion`, when all of its choices have ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from gateway.generation import Done, Event, Piece, is_whole
from gateway.openai.chat_form import ChatForm, chat_logprobs, finish_reason
from gateway.openai.identity import Identity
from gateway.openai.usage import usage_of


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def function(self) -> dict[str, str]:
        return {"name": self.name, "arguments": "".join(self.arguments)}


@dataclass(slots=True)
class _Choice:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    done: Done | None = None

    def add(self, piece: Piece) -> None:
        self.content.append(piece.content)
        self.reasoning.append(piece.reasoning)
        self.logprobs.extend(piece.logprobs)
        for part in piece.tool_calls:
            call = self.calls.setdefault(part.index, _Call())
            call.id = call.id or part.id
            call.name = call.name or part.name
            call.arguments.append(part.arguments)


async def chat_completion(
    events: AsyncIterator[tuple[int, Event]], identity: Identity, form: ChatForm
) -> dict[str, Any]:
    """The object, once the events have ended."""
    choices = [_Choice() for _ in range(form.choices)]
    async for index, event in events:
        if isinstance(event, Piece):
            choices[index].add(event)
        elif isinstance(event, Done):
            choices[index].done = event
    ends = [choice.done for choice in choices if choice.done is not None]
    return {
        "id": identity.id,
        "object": "chat.completion",
        "created": identity.created,
        "model": identity.model,
        "system_fingerprint": identity.system_fingerprint,
        "choices": [
            _whole(index, choice, end, form)
            for index, (choice, end) in enumerate(zip(choices, ends, strict=True))
        ],
        "usage": usage_of([end.usage for end in ends], form.choices),
    }


def _whole(index: int, choice: _Choice, end: Done, form: ChatForm) -> dict[str, Any]:
    """The choice; a call that was not written to its end is no part of a whole answer."""
    choice.calls = {
        place: call for place, call in choice.calls.items() if is_whole("".join(call.arguments))
    }
    return {
        "index": index,
        "message": _message(choice, form),
        "logprobs": chat_logprobs(choice.logprobs) if form.logprobs else None,
        "finish_reason": finish_reason(
            end.finish_reason, called=bool(choice.calls), legacy=form.legacy
        ),
    }


def _message(choice: _Choice, form: ChatForm) -> dict[str, Any]:
    text = "".join(choice.content)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if choice.calls and not text else text,
        "refusal": None,
        "annotations": [],
    }
    if form.reasoning and (reasoning := "".join(choice.reasoning)):
        message["reasoning_content"] = reasoning
    calls = [choice.calls[place] for place in sorted(choice.calls)]
    if calls and form.legacy:
        message["function_call"] = calls[0].function()
    elif calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function()} for call in calls
        ]
    return message
