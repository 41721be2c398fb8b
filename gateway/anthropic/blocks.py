"""The content blocks of Anthropic's messages that a text and vision model can be told."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.openai.base import Strict
from gateway.tagged import as_text, one_of, text_as


class TextBlock(Strict):
    """Text."""

    type: Literal["text"]
    text: str


class Base64Source(Strict):
    """An image in the request itself."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Strict):
    """An image to fetch, where the gateway allows that."""

    type: Literal["url"]
    url: str


ImageSource = Annotated[
    Base64Source | UrlSource,
    one_of(
        {"base64": Base64Source, "url": UrlSource},
        what="an image source",
    ),
]


class ImageBlock(Strict):
    """An image."""

    type: Literal["image"]
    source: ImageSource


class Base64VideoSource(Strict):
    """A video in the request itself."""

    type: Literal["base64"]
    media_type: Literal[
        "video/mp4", "video/quicktime", "video/webm", "video/x-matroska", "video/x-msvideo"
    ]
    data: str


class VideoBlock(Strict):
    """A video, as other hosts of this API take it; Anthropic's own models see none."""

    type: Literal["video"]
    source: Annotated[
        Base64VideoSource | UrlSource,
        one_of(
            {"base64": Base64VideoSource, "url": UrlSource},
            what="a video source",
        ),
    ]


class ToolUseBlock(Strict):
    """A call that the model made in an earlier turn; `caller`, who ran it, is not looked at."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ThinkingBlock(Strict):
    """What the model thought in an earlier turn; the signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Strict):
    """Thinking that only its own provider can read: left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


_ResultContent = Annotated[
    TextBlock | ImageBlock,
    one_of(
        {"text": TextBlock, "image": ImageBlock},
        what="a tool result",
        otherwise=as_text("text"),
    ),
]


class ToolResultBlock(Strict):
    """What a call came to."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[_ResultContent], text_as(_text_block, str | list[TextBlock | ImageBlock])
    ] = Field(default_factory=list)
    is_error: bool | None = None


_AnyBlock = (
    TextBlock
    | ImageBlock
    | VideoBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)

_INSTEAD: dict[str, str] = {
    "document": "send the text of the document in a text block",
    "search_result": "send the text of the result in a text block",
}


Block = Annotated[
    _AnyBlock,
    one_of(
        {
            "text": TextBlock,
            "image": ImageBlock,
            "video": VideoBlock,
            "tool_use": ToolUseBlock,
            "tool_result": ToolResultBlock,
            "thinking": ThinkingBlock,
            "redacted_thinking": RedactedThinkingBlock,
        },
        what="a content block",
        instead=_INSTEAD,
        otherwise=as_text("text"),
    ),
]
Content = Annotated[list[Block], text_as(_text_block, str | list[_AnyBlock])]


SystemContent = Annotated[
    list[
        Annotated[
            TextBlock,
            one_of(
                {"text": TextBlock},
                what="a system block",
                otherwise=as_text("text"),
            ),
        ]
    ],
    text_as(_text_block, str | list[TextBlock]),
]
