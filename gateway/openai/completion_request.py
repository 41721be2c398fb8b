"""The body of `/completions`: a prompt that is continued without a template."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from gateway.described import about
from gateway.openai import other_fields
from gateway.openai.base import TextRequest
from gateway.openai.format_fields import FormatFields
from gateway.openai.sampling_fields import MOST_ALTERNATIVES, MOST_TOKENS, SamplingFields

MOST_PROMPTS = 2048
Token = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[list[str | Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]


class CompletionRequest(SamplingFields, FormatFields, TextRequest):
    """OpenAI's legacy completion request, with the fields of the local servers."""

    others = other_fields.COMPLETION
    most_by_default: ClassVar[int] = 16  # tokens of an answer, OpenAI's default for completions

    prompt: str | Prompts | Tokens = Field(
        description="A text, its tokens, or a list of these; a list runs as one batch."
    )
    suffix: str | None = about("Text after the answer, for fill-in-the-middle.")
    echo: bool | None = about("Whether the prompt is returned before the answer.")
    best_of: int | None = about("Must equal n.", ge=1, le=128)
    logprobs: bool | Annotated[int, Field(ge=-1, le=MOST_ALTERNATIVES)] | None = about(
        "Log-probabilities, with this number of alternatives; -1: none (mlx_lm.server's default)."
    )

    def before(self) -> str | Prompts | Tokens:
        """Return the text or tokens to continue."""
        return self.prompt

    def infill(self) -> dict[str, Any] | None:
        """Return the suffix and other files for fill-in-the-middle; None if there are none."""
        return {"suffix": self.suffix, "files": []} if self.suffix else None
