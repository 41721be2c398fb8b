"""What Anthropic's clients may send without any effect here, each with the reason.

The two classes are the fields of the requests themselves; INSIDE lists those of their parts.
docs/gateway.md shows `table()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from gateway.anthropic.blocks import CacheControl
from gateway.openai.base import Strict

_LABEL = "a label for a provider's own records; the gateway keeps none"


class Metadata(Strict):
    """Labels of the client's own."""

    user_id: str | None = None


class NeutralPromptFields(Strict):
    """Fields of both requests that change nothing."""

    cache_control: CacheControl | None = Field(
        None, description="Neutral: every prefix of a prompt is remembered by itself."
    )
    speed: Literal["standard"] | None = Field(None, description="Neutral: there is one speed.")


class NeutralFields(Strict):
    """Fields of a message request that change nothing."""

    metadata: Metadata | None = Field(None, description=f"Neutral: user_id is {_LABEL}.")
    user_profile_id: str | None = Field(None, description=f"Neutral: {_LABEL}.")
    service_tier: Literal["auto", "standard_only"] | None = Field(
        None, description="Neutral: there is one tier."
    )


INSIDE: Mapping[str, str] = {
    "cache_control of blocks and tools": "every prefix of a prompt is remembered by itself",
    "thinking.budget_tokens": "local models cannot be told how long to think; max_tokens bounds "
    "thinking and answer together, and output_config.effort asks for less where the chat template "
    "knows efforts",
    "thinking.display: summarized": "thinking is shown whole; `omitted` is honoured",
    "citations of text blocks": "marks of earlier answers, which models are not shown",
    "signature of thinking blocks": "thinking is sent back in clear; answers have a constant there",
    "redacted_thinking blocks": "encrypted for another provider; the prompt goes without them",
    "caller of tool_use blocks": "calls are always the model's own",
    "tools[].allowed_callers: direct": "calls are always the model's own",
    "tools[].defer_loading: false": "tools are always shown",
    "tools[].eager_input_streaming": "arguments are sent as soon as the backend has them",
    "context_management with keep: all": "nothing is taken out of the prompt",
    "the headers anthropic-version and anthropic-beta": "there is one version",
}


def table() -> Mapping[str, str]:
    """Field → why it means nothing, for the documentation."""
    fields = NeutralPromptFields.model_fields | NeutralFields.model_fields
    reasons = {
        name: (field.description or "").removeprefix("Neutral: ") for name, field in fields.items()
    }
    return reasons | {name: f"{reason}." for name, reason in INSIDE.items()}
