"""The messages of a chat request, as clients of OpenAI and of local servers send them.

One class serves every role: the translation checks which fields a role may have, so that an error
names a path of the request and not an alternative of a union. Parts include Anthropic's, because
clients mix forms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from common import pdf_text
from common.field_names import named
from common.part_text import text_of
from gateway import exchange
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import Strict
from gateway.tagged import MOST_ENTRIES, OneOf, as_text

# Begins a signature or encrypted content that contains reasoning; clients return it unread.
SEAL = "reasoning:"
# Agents send each PDF again in all later requests, so a refusal would end the conversation.
UNREAD = "[A document, such as a PDF, could not be shown. Convert it to text, as with pdftotext.]"
SECONDS = 30.0  # for all PDFs of a request that were not read before
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
_Image = Literal["image_url", "image", "input_image"]
_Media = Literal[_Image, "video_url", "input_video", "input_audio", "audio_url"]
_URL = AliasChoices("image_url", "image")  # the latter is Hugging Face's
_INSTEAD = {"file": "send its text; only files of text and PDFs are read"}
_PLAIN = OneOf("a part", "text", _INSTEAD, as_text("text", media=True))
_LIMIT = Field(max_length=MOST_ENTRIES)
_Thought = Annotated[  # a text, or LobeChat's object with one
    str | None, BeforeValidator(lambda given: text_of(given) if isinstance(given, dict) else given)
]
RESULTS = ("tool", "function")
_NO_MEDIA = frozenset(
    "text refusal tool_use thinking redacted_thinking reasoning file input_file".split()
)
_UNSEEN = {"video_url": "A video", "input_audio": "A recording", "audio_url": "A recording"}


class Base64Data(Strict):
    """The bytes of a medium, as Anthropic sends them."""

    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def url(self) -> str:
        """The content as a data URI."""
        return f"data:{self.media_type};base64,{self.data}"


class Base64Source(Base64Data):
    """The bytes of an image."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


class UrlSource(Strict):
    """An image or a video to fetch, where the gateway allows that."""

    type: Literal["url"]
    url: str


ImageSource = Annotated[Base64Source | UrlSource, OneOf("an image source")]


class ToolUseBlock(Strict):
    """A call that the model made in an earlier turn; `caller` is ignored."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | str = Field(default_factory=dict)
    caller: dict[str, Any] | None = None


class ThoughtPart(Strict):
    """The assistant's reasoning in an earlier turn, also in Mistral's and LangChain's forms.

    What only its provider can read is left out of the prompt.
    """

    type: Literal["thinking", "redacted_thinking", "reasoning"]
    thinking: str | list[Any] | None = about("A text, or parts with texts.")
    reasoning: str | None = None
    text: str | None = None
    summary: list[Any] | None = None
    signature: str | None = None
    data: str | None = about("Not read.")

    @property
    def thought(self) -> str:
        given = self.thinking or self.reasoning or self.text or self.summary
        if given is None or isinstance(given, str):
            return given or (self.signature or "").partition(SEAL)[2]
        return "".join(map(text_of, given))


class PdfPart(Strict):
    """A PDF, to which `gateway.tagged` converts the forms in which clients send files."""

    type: Literal["file", "input_file"]
    file_data: str
    filename: str = ""

    async def read(self, seconds: float) -> tuple[str, float]:
        """Return the name and the text, or "" if there is none; and the seconds that are left."""
        read = await pdf_text.read(self.file_data, seconds)
        shown = f"{self.filename}\n{read.text}".lstrip() if read.text else ""
        return shown, seconds - read.seconds


class MediaUrl(Strict):
    """An image or a video as a data URI, or as a URL if the gateway may fetch it."""

    url: str


class InputAudio(Strict):
    """The bytes of a recording in base64."""

    data: str
    format: Literal["wav", "mp3"]


class ContentPart(Strict):
    """Text or one medium; `type` names the field that has the content."""

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
    def is_medium(self) -> bool:
        return self.type not in ("text", "refusal")

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


_Plain = Annotated[ContentPart | PdfPart, _PLAIN]


class ResultPart(Strict):
    """Anthropic's form of the result of a call, among the parts of a user's content."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[_Plain], _LIMIT] | None = None
    is_error: bool | None = None


Part = ContentPart | PdfPart | ToolUseBlock | ResultPart | ThoughtPart
Call = Annotated[ToolCall, OneOf("a call", default="function", otherwise=_custom_call)]


class RoleMapping(Strict):
    """The strings that mlx_lm.server puts around messages, for models without a chat template."""

    system: str = ""
    user: str = ""
    assistant: str = ""
    tool: str = ""
    stop: str = about("The text that ends every message.", "")


class ChatMessage(Strict):
    """One message. Fields that its role does not have are ignored, and calls refused."""

    role: Role
    content: str | Annotated[list[Annotated[Part, _PLAIN]], _LIMIT] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = about("Assistant: its calls.", max_length=MOST_ENTRIES)
    tool_call_id: str | None = about("Tool: the call whose result this is.")
    function_call: CalledFunction | None = about("Assistant, legacy: its only call.")
    reasoning_content: _Thought = about("Assistant: its reasoning before the answer.")
    reasoning: _Thought = about("Another name of reasoning_content.")
    thinking_blocks: Annotated[list[dict[str, Any]], _LIMIT] | None = about(
        "LiteLLM: reasoning_content in pieces."
    )
    reasoning_details: Annotated[list[dict[str, Any]], _LIMIT] | None = about(
        "OpenRouter: reasoning, in pieces."
    )
    refusal: str | None = about("Assistant: its answer, if it refused.")
    prefix: bool | None = about(
        "Mistral, DeepSeek, Kimi: the answer continues this message, the last one.",
        validation_alias=AliasChoices("prefix", "partial"),
    )

    @property
    def thought(self) -> str:
        """The assistant's reasoning, from any of the fields for it."""
        if plain := self.reasoning_content or self.reasoning:
            return plain
        pieces = [piece.get("thinking") for piece in self.thinking_blocks or ()]
        pieces = pieces or [
            piece.get("text") or piece.get("summary") for piece in self.reasoning_details or ()
        ]
        if not pieces and self.role == "assistant" and isinstance(self.content, list):
            pieces = [part.thought for part in self.content if isinstance(part, ThoughtPart)]
        return "".join(piece for piece in pieces if isinstance(piece, str))


_ADDED = ChatMessage.model_construct(role="user", content="")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message."""

    message: ChatMessage
    place: str
    parts: Sequence[tuple[str, Part]] = ()  # of the content, with their paths
    before: str = ""  # text to put in front of the content


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


def has_media(content: Any) -> bool:
    """Return whether content, or a tool result in it, has an image, a video or audio."""
    return isinstance(content, list) and any(
        has_media(part.content)
        if isinstance(part, ResultPart)
        else isinstance(part, ContentPart) and part.is_medium
        for part in content
    )


def without_media(messages: Sequence[ChatMessage], model: str) -> list[ChatMessage]:
    """Return the messages with a note instead of each image, video and audio.

    Agents send the whole conversation with every request, so an image of a tool's result, or of a
    time when another model answered, would end the conversation if it were refused. Raises ApiError
    for media that the newest user message itself shows, because the question is about them; with
    `--strict`, for any.

    model: the name of a model that accepts only text.
    """
    newest = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
    changed = list(messages)
    for at, message in enumerate(messages):
        if has_media(message.content):
            content = _readable(message.content, f"messages[{at}]", model, asked=at == newest)
            changed[at] = message.model_copy(update={"content": content})
    return changed


def _readable(content: Any, place: str, model: str, *, asked: bool) -> list[Any]:
    here = exchange.current()
    parts: list[Any] = []
    for at, part in enumerate(content):
        path = f"{place}.content[{at}]"
        if isinstance(part, ResultPart) and isinstance(part.content, list):
            inner = _readable(part.content, path, model, asked=False)
            part = part.model_copy(update={"content": inner})
        elif isinstance(part, ContentPart) and part.is_medium:
            if asked or here.strict:
                where = f"{path}.{part.field}"
                raise bad_field(
                    f"{named(where)} is not text, and the model {model} accepts only text"
                )
            here.ignore(f"{path}[{part.type}]")
            what = _UNSEEN.get(part.field, "An image")
            text = f"[{what} could not be shown: this model accepts only text.]"
            part = ContentPart.model_validate({"type": "text", "text": text})
        parts.append(part)
    return parts
