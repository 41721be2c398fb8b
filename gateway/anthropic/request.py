"""The requests of `/messages` and `/messages/count_tokens`, as Anthropic's API defines them.

gateway/anthropic/to_chat honours every field; gateway/tolerance handles all others.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from gateway.described import about
from gateway.openai.base import Request, Strict
from gateway.openai.other_fields import MESSAGES
from gateway.openai.parts import (
    UNREAD,
    Base64Data,
    ImageSource,
    PdfPart,
    ThoughtPart,
    ToolUseBlock,
    UrlSource,
)
from gateway.openai.sampling import Seed
from gateway.openai.thinking import ReasoningEffort
from gateway.openai.tools import MOST_TOOLS
from gateway.tagged import MOST_ENTRIES, OneOf, TextAs, as_text, drop, rather
from gateway.tolerance import DROPPED


class TextBlock(Strict):
    type: Literal["text"]
    text: str


class ImageBlock(Strict):
    type: Literal["image"]
    source: ImageSource


class Base64VideoSource(Base64Data):
    media_type: Literal[
        "video/mp4", "video/quicktime", "video/webm", "video/x-matroska", "video/x-msvideo"
    ]


class VideoBlock(Strict):
    """A video, as other servers with this API accept it; Anthropic's own models do not."""

    type: Literal["video"]
    source: Annotated[Base64VideoSource | UrlSource, OneOf("a video source")]


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


_text = as_text("text", UNREAD)
_Result = Annotated[TextBlock | ImageBlock | PdfPart, OneOf("a tool result", "text", {}, _text)]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[_Result], TextAs(_text_block)] = Field(default_factory=list)
    is_error: bool | None = None


Block = TextBlock | ImageBlock | VideoBlock | PdfPart | ToolUseBlock | ToolResultBlock | ThoughtPart
_Block = Annotated[Block, OneOf("a content block", "text", otherwise=_text)]
Content = Annotated[list[_Block], TextAs(_text_block)]
_SystemBlock = Annotated[TextBlock, OneOf("a system block", "text", otherwise=_text)]
SystemContent = Annotated[list[_SystemBlock], TextAs(_text_block)]


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Content

    _settings = rather(
        lambda turn: None if "content" in turn or turn.get("role") != "system" else DROPPED,
        "content is missing: send it",
        lossless=False,
    )

    @model_validator(mode="after")
    def _with_caller(self) -> Self:
        if any(isinstance(block, ToolUseBlock) for block in self.content):
            self.role = "assistant"  # AgentKit sends calls in turns of the user
        return self


class Tool(Strict):
    """A tool that the client runs."""

    name: str = Field(min_length=1, max_length=128)
    input_schema: dict[str, Any] = Field(default_factory=dict)
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


_Tool = Annotated[Tool, OneOf("a tool", default="custom", otherwise=drop)]


class ChooseFreely(Strict):
    """The model decides (auto), must call one of the tools (any), or calls none."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class ChooseTool(Strict):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


ToolChoice = Annotated[ChooseFreely | ChooseTool, OneOf("a tool_choice")]


class Thinking(Strict):
    """Whether the model thinks first; `adaptive` leaves the decision to the model."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = about("Maximum tokens of thinking.", ge=0, le=2**31 - 1)
    display: str | None = about("omitted: thinking is not shown.")


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The effort, and the format of the answer."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Request):
    """The fields that make up the prompt."""

    others = MESSAGES

    messages: list[Turn] = Field(min_length=1, max_length=MOST_ENTRIES)
    system: SystemContent | None = None
    tools: list[_Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Annotated[Thinking, OneOf("thinking", otherwise=drop)] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = about("Older name of output_config.format.")


class MessagesRequest(CountTokensRequest):
    """One message to generate; `max_tokens` 0 reads the prompt into the prefix cache."""

    max_tokens: int = Field(ge=0, le=2**31 - 1)
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    seed: Seed | None = about("As in chats; not Anthropic's.")
