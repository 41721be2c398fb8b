"""Parts of messages that several APIs accept: PDFs, and Anthropic's, because clients mix forms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from common import pdf_text
from common.part_text import text_of
from gateway import exchange
from gateway.described import about
from gateway.fields import Strict
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


# Agents send each PDF again in all later requests, so a refusal would end the conversation.
UNREAD = "[A document, such as a PDF, could not be shown. Convert it to text, as with pdftotext.]"
SECONDS = 30.0  # for all PDFs of a request that were not read before


class PdfPart(Strict):
    """A PDF; `gateway.tagged` makes it of the forms in which clients send files."""

    type: Literal["file", "input_file"]
    file_data: str
    filename: str = ""

    async def read(self, seconds: float) -> tuple[str, float]:
        """Return the name and the text, or UNREAD; and what is left of the request's SECONDS."""
        read = await pdf_text.read(self.file_data, seconds)
        if not read.text:
            exchange.current().ignore(f"messages[].content[][{self.type}]")
        shown = f"{self.filename}\n{read.text}".lstrip() if read.text else UNREAD
        return shown, seconds - read.seconds
