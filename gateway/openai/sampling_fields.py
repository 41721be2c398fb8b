"""The fields that say how tokens are chosen and when to end: the same for chat and completions.

Names come from OpenAI, llama.cpp's server, mlx_lm.server, MLC-LLM and vLLM. Two names of one thing
may both be sent if they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from gateway.openai.base import Strict

MOST_CHOICES = 128  # OpenAI's bound of `n`
MOST_STOPS = 64
MOST_ALTERNATIVES = 20  # OpenAI's bound of `top_logprobs`
MOST_TOKENS = 2**31 - 1
LARGEST_PENALTY = 100.0

TokenId = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-1e6, le=1e6)]


class SamplingFields(Strict):
    """How tokens are chosen and when an answer ends. Null is as good as absent everywhere."""

    temperature: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="0 takes the likeliest token. Default: the model's, or 1.",
    )
    top_p: float | None = Field(
        default=None, ge=0, le=1, description="Share of probability to keep; 1 keeps all."
    )
    top_k: int | None = Field(
        default=None, ge=-1, le=MOST_TOKENS, description="Tokens to keep; 0 and -1 keep all."
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of the likeliest token's probability; 0 is off.",
    )
    typical_p: float | None = Field(
        default=None, ge=0, le=1, description="Locally typical sampling; 1 is off."
    )
    xtc_probability: float | None = Field(
        default=None, ge=0, le=1, description="XTC: chance per token to leave the likeliest out."
    )
    xtc_threshold: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="XTC: probability from which a token counts as likely.",
    )
    presence_penalty: float | None = Field(
        default=None,
        ge=-LARGEST_PENALTY,
        le=LARGEST_PENALTY,
        description="Taken from the logit of every token that the answer has; OpenAI: -2 to 2.",
    )
    frequency_penalty: float | None = Field(
        default=None,
        ge=-LARGEST_PENALTY,
        le=LARGEST_PENALTY,
        description="The same, as often as the answer has it; OpenAI: -2 to 2.",
    )
    presence_context_size: int | None = Field(
        default=None,
        ge=0,
        le=1 << 20,
        description="mlx_lm.server: presence_penalty counts among so many last tokens of prompt and"
        " answer; 0 none. Without it: the whole answer, and nothing of the prompt.",
    )
    frequency_context_size: int | None = Field(
        default=None, ge=0, le=1 << 20, description="The same for frequency_penalty."
    )
    repeat_penalty: float | None = Field(
        default=None,
        ge=0,
        le=LARGEST_PENALTY,
        description="Divides the logits of tokens of prompt and answer; 0 and 1 are off.",
    )
    repetition_penalty: float | None = Field(
        default=None, ge=0, le=LARGEST_PENALTY, description="Another name of repeat_penalty."
    )
    repeat_last_n: int | None = Field(
        default=None,
        ge=-1,
        le=MOST_TOKENS,
        description="Tokens that repeat_penalty looks back: 64 by default, -1 all, 0 none.",
    )
    repetition_context_size: int | None = Field(
        default=None, ge=-1, le=MOST_TOKENS, description="Another name of repeat_last_n."
    )
    logit_bias: dict[TokenId, Bias] | None = Field(
        default=None, description="Token id → what is added to its logit.", max_length=10_000
    )
    seed: int | None = Field(
        default=None,
        ge=-(2**63),
        le=2**64 - 1,
        description="The same seed and request give the same answer; choice i has seed + i."
        " -1 draws one.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=MOST_TOKENS,
        description="Most tokens to generate; -1: up to the end of the context.",
    )
    n_predict: int | None = Field(
        default=None, ge=-1, le=MOST_TOKENS, description="Another name of max_tokens."
    )
    min_tokens: int | None = Field(
        default=None, ge=0, le=1 << 20, description="Tokens before which the answer cannot end."
    )
    ignore_eos: bool | None = Field(
        default=None, description="Goes on where the model would end, up to max_tokens."
    )
    stop: str | list[str] | None = Field(
        default=None,
        description=f"Up to {MOST_STOPS} texts; the first to appear ends the answer before it.",
    )
    n: int | None = Field(
        default=None, ge=1, le=MOST_CHOICES, description="Answers to give; they run as one batch."
    )
    num_draft_tokens: int | None = Field(
        default=None,
        ge=0,
        le=MOST_TOKENS,
        description="Tokens to guess ahead where the model has a draft model; does not change the"
        " answer.",
    )
    n_probs: int | None = Field(
        default=None,
        ge=0,
        le=MOST_ALTERNATIVES,
        description="Log-probabilities with so many alternatives; 0 is off.",
    )
    adapters: str | None = Field(
        default=None, description="mlx_lm.server: one of the adapters of the model's file, by name."
    )
    draft_model: str | None = Field(
        default=None,
        description="mlx_lm.server: one of the draft_models of the model's file; does not change"
        " the answer.",
    )

    def fill(self, values: Mapping[str, Any]) -> None:
        """Set the fields that are still unset."""
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)


class Options(SamplingFields):
    """Ollama's object of sampling fields, under their names here and its own one."""

    n_predict: int | None = Field(
        default=None, alias="num_predict", ge=-2, le=MOST_TOKENS, description="-1 and -2: no bound."
    )
