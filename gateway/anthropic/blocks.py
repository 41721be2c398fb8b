"""The content blocks of Anthropic's messages that text and vision models can read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.openai.anthropic_parts import (
    Base64Data,
    ImageSource,
    ThoughtPart,
    ToolUseBlock,
    UrlSource,
)
from gateway.openai.base import Strict
from gateway.openai.pdf_part import UNREAD, PdfPart
from gateway.tagged import OneOf, TextAs, as_text


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
