"""The messages that a backend gets for those of a chat request, each with its path in the request.

They differ in number: a result among a user's parts (Anthropic's form) becomes a message of its
own, and media are shown in a user message, because templates allow them nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.openai.messages import CalledFunction, ChatMessage, Part, ResultPart, ToolCall
from gateway.openai.parts import ToolUseBlock

RESULTS = ("tool", "function")
_NO_MEDIA = frozenset(
    "text refusal tool_use thinking redacted_thinking reasoning file input_file".split()
)
_ADDED = ChatMessage.model_construct(role="user", content="")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message.

    parts: those of its content, with their paths.
    before: text to put in front of it.
    """

    message: ChatMessage
    place: str
    parts: Sequence[tuple[str, Part]] = ()
    before: str = ""


def turns_of(messages: Sequence[ChatMessage]) -> Iterator[Turn]:
    shown = ""  # the path of the last message whose media wait for a user message
    for index, message in enumerate(messages):
        for turn in _split(message, f"messages[{index}]"):
            if turn.message.role not in RESULTS:
                if shown and turn.message.role != "user":
                    yield Turn(_ADDED, shown)
                shown = ""
            if turn.message.role != "user" and {part.type for _, part in turn.parts} - _NO_MEDIA:
                shown = turn.place
            yield turn
    if shown:
        yield Turn(_ADDED, shown)


def _split(message: ChatMessage, place: str) -> Iterator[Turn]:
    """Yield the message, with calls and results among its parts as chat templates know them."""
    content = message.content if isinstance(message.content, list) else []
    calls = list(message.tool_calls or ())
    ids = {call.id for call in calls if call.id}
    parts: list[tuple[str, Part]] = []
    for at, part in enumerate(content):
        path = f"{place}.content[{at}]"
        if isinstance(part, ToolUseBlock) and message.role == "assistant":
            if part.id not in ids:  # some clients send both
                ids |= {part.id} - {""}
                function = CalledFunction.model_construct(name=part.name, arguments=part.input)
                calls.append(ToolCall.model_construct(id=part.id, function=function))
        elif isinstance(part, ResultPart) and message.role == "user":
            if parts:
                yield Turn(message, place, parts)
                parts = []
            yield _result(part, path)
        else:
            parts.append((path, part))
    if len(calls) > len(message.tool_calls or ()):
        message = message.model_copy(update={"tool_calls": calls})
    if parts or message.role != "user" or not content:
        yield Turn(message, place, parts)


def _result(result: ResultPart, path: str) -> Turn:
    message = ChatMessage.model_construct(
        role="tool", tool_call_id=result.tool_use_id, content=result.content
    )
    inner = result.content if isinstance(result.content, list) else ()
    parts = [(f"{path}.content[{at}]", part) for at, part in enumerate(inner)]
    return Turn(message, path, parts, "Error: " if result.is_error else "")
