"""What clients of Responses may send without any effect here, each with the reason.

The class is the fields of the request itself; INSIDE lists those of its parts. docs/gateway.md
shows `table()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from gateway.openai.base import Strict

_LABEL = "Neutral: a label for a provider's own records; the gateway keeps none."
_CACHE = "Neutral: every prefix is remembered, and the answer does not depend on it."


class StreamOptions(Strict):
    """What a stream tells beside the answer."""

    include_obfuscation: bool | None = None


class NeutralFields(Strict):
    """Accepted, and without meaning for a server of one machine."""

    user: str | None = Field(None, description=_LABEL)
    safety_identifier: str | None = Field(None, description=_LABEL)
    client_metadata: dict[str, Any] | None = Field(None, description=_LABEL)
    prompt_cache_key: str | None = Field(None, description=_CACHE)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description=_CACHE
    )
    service_tier: Literal["auto", "default", "flex", "priority"] | None = Field(
        None, description="Neutral: there is one tier; answers say default."
    )
    max_tool_calls: int | None = Field(
        None, ge=1, description="Neutral: bounds calls of hosted tools, and there are none."
    )
    stream_options: StreamOptions | None = Field(
        None,
        description="Neutral: include_obfuscation pads events against eavesdroppers on the"
        " internet; events are sent unpadded.",
    )


INSIDE: Mapping[str, str] = {
    "reasoning.summary, reasoning.generate_summary": "reasoning is told whole, as reasoning_text",
    "text.verbosity": "a trait of hosted models; say it in the prompt",
    "include: reasoning.encrypted_content": "reasoning is told in clear, and may be sent back so",
    "include: message.input_image.image_url": "input items are always told whole",
    "encrypted_content of reasoning items": "encrypted for another provider; content or summary "
    "is shown to the model where there is one",
    "annotations and logprobs of output_text parts": "marks of earlier answers",
    "phase, id and status of items": "the order of items says it all",
    "detail of input_image": "local models see an image as they were trained",
    "tools[].strict: null": "as false: arguments are not held to the schema",
}


def table() -> Mapping[str, str]:
    """Field → why it means nothing, for the documentation."""
    fields = {
        name: (field.description or "").removeprefix("Neutral: ")
        for name, field in NeutralFields.model_fields.items()
    }
    return fields | {name: f"{reason}." for name, reason in INSIDE.items()}
