"""The items of a Responses conversation: messages, calls, results of calls, and reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from gateway.openai.base import Strict
from gateway.tagged import as_text, one_of, text_as
from gateway.tolerance import DROPPED

Status = str


class InputText(Strict):
    """Text that the client says."""

    type: Literal["input_text"] = "input_text"
    text: str


class OutputText(Strict):
    """Text that the model said earlier; annotations and log-probabilities are not looked at."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Strict):
    """A refusal of an earlier answer, which is text like any other."""

    type: Literal["refusal"]
    refusal: str


class InputImage(Strict):
    """An image by data URI, or by address where the gateway is allowed to fetch it."""

    type: Literal["input_image"]
    image_url: str


class InputVideo(Strict):
    """A video, the same way."""

    type: Literal["input_video"]
    video_url: str


_Part = InputText | OutputText | Refusal | InputImage | InputVideo


Part = Annotated[
    _Part,
    one_of(
        {
            "input_text": InputText,
            "output_text": OutputText,
            "refusal": Refusal,
            "input_image": InputImage,
            "input_video": InputVideo,
        },
        what="a part",
        otherwise=as_text("input_text"),
    ),
]


def _input_text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


_Content = Annotated[list[Part], text_as(_input_text, str | list[_Part])]


class Message(Strict):
    """What one side said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCall(Strict):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    id: str | None = None
    status: Status | None = None


class CustomCall(Strict):
    """A call of a tool that takes plain text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Strict):
    """What a call came to."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Content
    id: str | None = None
    status: Status | None = None
    name: str | None = None


class ReasoningText(Strict):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(Strict):
    """A summary of what a model thought."""

    type: Literal["summary_text"]
    text: str


class Reasoning(Strict):
    """Reasoning of an earlier answer: its content, else its summary, is shown to the model."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class ItemReference(Strict):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: str


Item = Message | FunctionCall | CustomCall | FunctionCallOutput | Reasoning
Sent = Item | ItemReference


_KINDS: dict[str, type[Item]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "custom_tool_call": CustomCall,
    "custom_tool_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
}
_Sent = Annotated[
    Sent,
    one_of(
        {**_KINDS, "item_reference": ItemReference},
        what="an item",
        default="message",
        otherwise=lambda _: DROPPED,
    ),
]
_Stored = Annotated[Item, one_of(_KINDS, what="an item", default="message")]


def _user_message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


Input = Annotated[list[_Sent], text_as(_user_message, str | list[Sent])]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[_Stored])
