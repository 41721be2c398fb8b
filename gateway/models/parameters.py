"""`parameters:` of a model file: which model, and defaults for requests."""

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
"""Defaults when neither the request nor the model sets a value: OpenAI's, or off."""


class Parameters(Strict):
    """None means not set in the file: then the checkpoint's value applies, else UNSAID."""

    model: str = Field(
        min_length=1,
        description="Hub id (`owner/name`), folder under the models folder, or absolute path.",
    )
    temperature: float | None = Field(
        default=None, ge=0, le=100, description="0 always picks the most likely token."
    )
    top_p: Share | None = Field(default=None, description="Probability mass to keep.")
    top_k: int | None = Field(
        default=None, ge=-1, description="Number of tokens to keep; 0 or -1 is off."
    )
    min_p: Share | None = Field(
        default=None, description="Minimum probability, as a share of the most likely token's."
    )
    typical_p: Share | None = Field(default=None, description="Locally typical sampling; 1 is off.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Maximum number of tokens in an answer."
    )
    seed: int | None = Field(
        default=None, ge=-1, lt=1 << 31, description="-1 draws a new one for each request."
    )
    repeat_penalty: float | None = Field(
        default=None,
        ge=0,
        description="llama.cpp's repetition penalty over prompt and answer; 1 is off.",
    )
    repeat_last_n: int | None = Field(
        default=None,
        ge=-1,
        description="Number of recent tokens that repeat_penalty covers; -1 means all.",
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="OpenAI's; 0 is off."
    )
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="OpenAI's; 0 is off."
    )
    logit_bias: dict[str, float] | None = Field(
        default=None, description="Token id → value added to its logit."
    )
    ignore_eos: bool | None = Field(
        default=None, description="Continue after the end-of-sequence token, up to max_tokens."
    )
    tokenizer: str = Field(default="", description="Passed to LoadModel; refused by this backend.")
    rope_freq_base: float = Field(default=0, description="Passed to LoadModel.")
    rope_freq_scale: float = Field(default=0, description="Passed to LoadModel.")

    def chosen(self, name: str, given: float | None = None) -> float:
        """The value of a request, else the model's, else that of UNSAID."""
        value: float | None = getattr(self, name) if given is None else given
        return UNSAID[name] if value is None else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_ids(cls, given: Any) -> Any:
        """YAML reads an id as a number; JSON, which goes to the backend, allows only text keys."""
        if not isinstance(given, dict):
            return given
        return {str(key) if type(key) is int else key: value for key, value in given.items()}

    @model_validator(mode="before")
    @classmethod
    def _foreign(cls, given: Any) -> Any:
        return without_foreign(given, "parameters.")
