"""The messages of a chat request, as clients of OpenAI and of local servers send them.

One class serves every role: the translation checks which fields a role may have, so that an error
names a path of the request and not an alternative of a union.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from common.part_text import text_of
from gateway.described import about
from gateway.fields import Strict
from gateway.openai.parts import ImageSource, PdfPart, ThoughtPart, ToolUseBlock
from gateway.tagged import MOST_ENTRIES, OneOf, as_text

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class MediaUrl(Strict):
    """An image or a video as a data URI, or as a URL if the gateway may fetch it."""

    url: str


class InputAudio(Strict):
    data: str
    format: Literal["wav", "mp3"]


_Image = Literal["image_url", "image", "input_image"]
_Media = Literal[_Image, "video_url", "input_video", "input_audio", "audio_url"]
_URL = AliasChoices("image_url", "image")  # the latter is Hugging Face's


class ContentPart(Strict):
    type: Literal["text", "refusal"] | _Media
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | str | None = Field(None, validation_alias=_URL)
    source: ImageSource | None = about("For parts of the type image.")
    video_url: MediaUrl | str | None = about("For parts of the types video_url and input_video.")
    input_audio: InputAudio | None = None
    audio_url: MediaUrl | str | None = about("vLLM's form of input_audio, as a data URI.")

    @property
    def field(self) -> str:
        """The field in which a part of this type has its content."""
        image = "source" if self.type == "image" and self.image_url is None else "image_url"
        names = {"input_video": "video_url", "image": image, "input_image": image}
        return names.get(self.type, self.type)

    @property
    def url(self) -> str | None:
        for given in (self.image_url, self.source, self.video_url, self.audio_url):
            if given is not None:
                return given if isinstance(given, str) else given.url
        return None


class CalledFunction(Strict):
    """A function and the arguments that the model gave it, as JSON text."""

    name: str
    arguments: str | dict[str, Any] = ""
    index: int | None = about("Ollama: the call's position; not read.")


def _custom_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a tool that accepts plain text, as a function call."""
    custom = call.get("custom")
    called = custom if isinstance(custom, dict) else call
    arguments = json.dumps({"input": called.get("input", "")}, ensure_ascii=False)
    function = {"name": called.get("name", ""), "arguments": arguments}
    return {"id": call.get("id") or "", "type": "function", "function": function}


class ToolCall(Strict):
    """A call that the assistant made earlier in the conversation."""

    id: str = ""
    type: Literal["function", "custom"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, call: Any) -> Any:
        return _custom_call(call) if isinstance(call, dict) and "custom" in call else call


_INSTEAD = {"file": "send its text; only files of text and PDFs are read"}
_PLAIN = OneOf("a part", "text", _INSTEAD, as_text("text", media=True))


_LIMIT = Field(max_length=MOST_ENTRIES)
_Plain = Annotated[ContentPart | PdfPart, _PLAIN]


class ResultPart(Strict):
    """Anthropic's form of the result of a call, among the parts of a user's content."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[_Plain], _LIMIT] | None = None
    is_error: bool | None = None


Part = ContentPart | PdfPart | ToolUseBlock | ResultPart | ThoughtPart
Call = Annotated[ToolCall, OneOf("a call", default="function", otherwise=_custom_call)]


_Thought = Annotated[  # a text, or LobeChat's object with one
    str | None, BeforeValidator(lambda given: text_of(given) if isinstance(given, dict) else given)
]


class ChatMessage(Strict):
    role: Role
    content: str | Annotated[list[Annotated[Part, _PLAIN]], _LIMIT] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = about("Assistant: its calls.", max_length=MOST_ENTRIES)
    tool_call_id: str | None = about("Tool: the call whose result this is.")
    function_call: CalledFunction | None = about("Assistant, legacy: its only call.")
    reasoning_content: _Thought = about("Assistant: its reasoning before the answer.")
    reasoning: _Thought = about("Another name of reasoning_content.")
    thinking_blocks: list[dict[str, Any]] | None = about("LiteLLM: reasoning_content in pieces.")
    reasoning_details: list[dict[str, Any]] | None = about("OpenRouter: reasoning, in pieces.")
    refusal: str | None = about("Assistant: its answer, if it refused.")
    prefix: bool | None = about(
        "Mistral, DeepSeek, Kimi: the answer continues this message, the last one.",
        validation_alias=AliasChoices("prefix", "partial"),
    )

    @property
    def thought(self) -> str:
        """The assistant's reasoning, under whatever name."""
        if plain := self.reasoning_content or self.reasoning:
            return plain
        pieces = [piece.get("thinking") for piece in self.thinking_blocks or ()]
        pieces = pieces or [piece.get("text") for piece in self.reasoning_details or ()]
        if not pieces and self.role == "assistant" and isinstance(self.content, list):
            pieces = [part.thought for part in self.content if isinstance(part, ThoughtPart)]
        return "".join(piece for piece in pieces if isinstance(piece, str))
