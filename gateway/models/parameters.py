"""`parameters:` of a model file: which model, and what a request gets where it does not say."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gateway.models.foreign import without_foreign

Share = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """A section of a model file: nothing unknown, nothing of another type, nothing changed."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


UNSAID = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What counts where neither a request nor the model says anything: OpenAI's, and what is off."""


class Parameters(Strict):
    """None means that the file does not say: then the checkpoint's word counts, else UNSAID."""

    model: str = Field(
        min_length=1,
        description="Hub id (`owner/name`), folder under the models folder, or absolute path.",
    )
    temperature: float | None = Field(
        default=None, ge=0, le=100, description="0 takes the best token."
    )
    top_p: Share | None = Field(default=None, description="Share of probability to keep.")
    top_k: int | None = Field(default=None, ge=-1, description="Tokens to keep; 0 or -1 is off.")
    min_p: Share | None = Field(default=None, description="Share of the best token's probability.")
    typical_p: Share | None = Field(default=None, description="Locally typical sampling; 1 is off.")
    max_tokens: int | None = Field(default=None, ge=1, description="Most tokens of an answer.")
    seed: int | None = Field(
        default=None, ge=-1, lt=1 << 31, description="-1 draws one per request."
    )
    repeat_penalty: float | None = Field(
        default=None, ge=0, description="llama.cpp's, over prompt and answer; 1 is off."
    )
    repeat_last_n: int | None = Field(
        default=None, ge=-1, description="Tokens that repeat_penalty looks back; -1 means all."
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="OpenAI's; 0 is off."
    )
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="OpenAI's; 0 is off."
    )
    logit_bias: dict[str, float] | None = Field(
        default=None, description="Token id → what is added to its logit."
    )
    ignore_eos: bool | None = Field(
        default=None, description="Go on after the end-of-sequence token, up to max_tokens."
    )
    tokenizer: str = Field(default="", description="Passed to LoadModel; refused by this backend.")
    rope_freq_base: float = Field(default=0, description="Passed to LoadModel.")
    rope_freq_scale: float = Field(default=0, description="Passed to LoadModel.")

    def default(self, name: str) -> float:
        """What a request gets that does not say: the model's value, else that of UNSAID."""
        value: float | None = getattr(self, name)
        return UNSAID[name] if value is None else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_ids(cls, given: Any) -> Any:
        """YAML reads an id as a number, and JSON, which the backend is sent, has text only."""
        if not isinstance(given, dict):
            return given
        return {str(key) if type(key) is int else key: value for key, value in given.items()}

    @model_validator(mode="before")
    @classmethod
    def _foreign(cls, given: Any) -> Any:
        return without_foreign(given, "parameters.")
