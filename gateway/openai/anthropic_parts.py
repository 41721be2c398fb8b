"""Parts of Anthropic's messages that chats may have too, because clients mix the two forms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from common.part_text import text_of
from gateway.described import about
from gateway.openai.base import Strict
from gateway.tagged import OneOf

# Begins a signature or encrypted content that contains reasoning; clients return it unread.
SEAL = "reasoning:"


class Base64Data(Strict):
    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def url(self) -> str:
        """The content as a data URI."""
        return f"data:{self.media_type};base64,{self.data}"


class Base64Source(Base64Data):
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
