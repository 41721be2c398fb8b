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


def _unknown_source(kind: str) -> str:
    return f"an image source of type {kind} is not served: send base64 or url"


ImageSource = Annotated[
    Base64Source | UrlSource,
    one_of(
        {"base64": Base64Source, "url": UrlSource},
        schema=Base64Source | UrlSource,
        unknown=_unknown_source,
    ),
]


class ImageBlock(Strict):
    """An image."""

    type: Literal["image"]
    source: ImageSource


class ToolUseBlock(Strict):
    """A call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


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


def _unknown_result(kind: str) -> str:
    return f"a tool result of type {kind} is not served: send text or image blocks"


_ResultContent = Annotated[
    TextBlock | ImageBlock,
    one_of(
        {"text": TextBlock, "image": ImageBlock},
        schema=TextBlock | ImageBlock,
        unknown=_unknown_result,
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
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
)

_INSTEAD = {
    "document": "send the text of the document in a text block",
    "search_result": "send the text of the result in a text block",
}


def _unknown_block(kind: str) -> str:
    instead = _INSTEAD.get(
        kind,
        "send text, image, tool_use, tool_result, thinking or redacted_thinking",
    )
    return f"a content block of type {kind} is not served: {instead}"


Block = Annotated[
    _AnyBlock,
    one_of(
        {
            "text": TextBlock,
            "image": ImageBlock,
            "tool_use": ToolUseBlock,
            "tool_result": ToolResultBlock,
            "thinking": ThinkingBlock,
            "redacted_thinking": RedactedThinkingBlock,
        },
        schema=_AnyBlock,
        unknown=_unknown_block,
        otherwise=as_text("text"),
    ),
]
Content = Annotated[list[Block], text_as(_text_block, str | list[_AnyBlock])]


def _unknown_text(kind: str) -> str:
    return f"a block of type {kind} cannot stand here: send text blocks"


SystemContent = Annotated[
    list[
        Annotated[
            TextBlock,
            one_of(
                {"text": TextBlock},
                schema=TextBlock,
                unknown=_unknown_text,
                otherwise=as_text("text"),
            ),
        ]
    ],
    text_as(_text_block, str | list[TextBlock]),
]
