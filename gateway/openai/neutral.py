"""Fields that are accepted and mean nothing here, each with the reason. This class is the table.

A field is here if the answer is the same without it for everybody; what would change the answer
and cannot be done is in `gateway.openai.refused`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from gateway.openai.base import Strict

_LABEL = "Neutral: a label for a provider's own records; the gateway keeps none."
_CACHE = "Neutral: every prefix is remembered, and the answer does not depend on it."
_DRAFT = "Neutral: how tokens are guessed ahead does not change the answer."


class NeutralFields(Strict):
    """Accepted, and without meaning for a server of one machine."""

    user: str | None = Field(default=None, description=_LABEL)
    safety_identifier: str | None = Field(default=None, description=_LABEL)
    metadata: dict[str, Any] | None = Field(default=None, description=_LABEL)
    request_id: str | None = Field(
        default=None, description="Neutral: send the header x-request-id to name a request."
    )
    store: bool | None = Field(default=None, description="Neutral: nothing is ever stored.")
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = Field(
        default=None, description="Neutral: there is one tier."
    )
    priority: Literal[0] | None = Field(
        default=None, description="Neutral: requests are served in order."
    )
    prompt_cache_key: str | None = Field(default=None, description=_CACHE)
    prompt_cache_retention: str | None = Field(default=None, description=_CACHE)
    cache_prompt: bool | None = Field(default=None, description=_CACHE)
    id_slot: int | None = Field(
        default=None, description="Neutral: the place in the batch does not change the answer."
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        default=None, description="Neutral: a trait of hosted models; say it in the prompt."
    )
    penalize_nl: bool | None = Field(
        default=None,
        description="Neutral: penalties count newlines like any token, as in llama.cpp.",
    )
    n_keep: int | None = Field(
        default=None,
        description="Neutral: says what to keep when a context is shifted; none ever is.",
    )
    n_discard: int | None = Field(default=None, description="Neutral: as n_keep.")
    min_keep: Literal[0] | None = Field(default=None, description="Neutral at 0.")
    speculative_n_max: int | None = Field(
        default=None, alias="speculative.n_max", description=_DRAFT
    )
    speculative_n_min: int | None = Field(
        default=None, alias="speculative.n_min", description=_DRAFT
    )
    speculative_p_min: float | None = Field(
        default=None, alias="speculative.p_min", description=_DRAFT
    )
    guided_decoding_backend: str | None = Field(
        default=None, description="Neutral: there is one, and the form of the answer is the same."
    )


def table() -> Mapping[str, str]:
    """Field → why it means nothing, for the documentation."""
    return {
        field.alias or name: (field.description or "").removeprefix("Neutral: ")
        for name, field in NeutralFields.model_fields.items()
    }
