"""PDFs among the parts of a message, of which the model gets the text."""

from __future__ import annotations

from typing import Literal

from common import pdf_text
from gateway import exchange
from gateway.openai.base import Strict

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
