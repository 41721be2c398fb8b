"""The fields for sampling and for ending an answer, which chat and completions share.

Names come from OpenAI, llama.cpp's server, mlx_lm.server, MLC-LLM and vLLM. Several names of one
field may be sent if their values agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gateway.described import about
from gateway.openai.base import Strict

MOST_CHOICES = 128  # OpenAI's limit for `n`
MOST_STOPS = 64
MOST_ALTERNATIVES = 20  # OpenAI's limit for `top_logprobs`
MOST_TOKENS = 2**31 - 1

TokenId = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-1e6, le=1e6)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Divisor = Annotated[float, Field(ge=0, le=100)]
Natural = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Count = Annotated[int, Field(ge=-1, le=MOST_TOKENS)]  # -1: all, or no limit
Window = Annotated[int, Field(ge=0, le=1 << 20)]
Alternatives = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]


def _biases(value: Any) -> Any:
    """Convert llama.cpp's list of pairs to an object; false forbids a token."""
    if isinstance(value, list) and all(isinstance(each, list) and len(each) == 2 for each in value):
        return {str(token): -1e6 if bias is False else bias for token, bias in value}
    return value


class Lora(Strict):
    """One item of llama.cpp's `lora`."""

    id: Natural
    scale: float


class CommonSampling(Strict):
    """The sampling fields that `/responses` has as well. Null always means absent."""

    temperature: Temperature | None = about("0: the likeliest token. Default: the model's, or 1.")
    top_p: Share | None = about("Share of probability to keep; 1 keeps all.")
    top_k: Count | None = about("Tokens to keep; 0 and -1 keep all.")
    min_p: Share | None = about("Share of the best token's probability; 0: off.")
    presence_penalty: Penalty | None = about("Subtracted from the logits of the answer's tokens.")
    frequency_penalty: Penalty | None = about("As presence_penalty, times occurrences.")
    seed: Seed | None = about(
        "The same seed and request give the same answer; choice i uses seed + i. -1: random."
    )
    stop: str | list[str] | None = about(f"Up to {MOST_STOPS} texts that end the answer.")


class SamplingFields(CommonSampling):
    """How tokens are chosen and when an answer ends."""

    typical_p: Share | None = about("Locally typical sampling; 1 is off.")
    xtc_probability: Share | None = about("Probability that XTC is applied to a token.")
    xtc_threshold: Share | None = about("XTC: tokens from this probability on are likely.")
    presence_context_size: Window | None = about(
        "mlx_lm.server: presence_penalty covers this number of recent tokens of prompt"
        " and answer; 0 none. Without it: the whole answer, and none of the prompt."
    )
    frequency_context_size: Window | None = about("mlx_lm.server: the same for frequency_penalty.")
    repeat_penalty: Divisor | None = about("Divides the logits of earlier tokens; 0 and 1: off.")
    repetition_penalty: Divisor | None = about("Another name of repeat_penalty.")
    repeat_last_n: Count | None = about("Latest tokens for repeat_penalty: 64 by default, -1 all.")
    repetition_context_size: Count | None = about("Alias of repeat_last_n.")
    logit_bias: Annotated[dict[TokenId, Bias] | None, BeforeValidator(_biases)] = Field(
        None, description="Token id → value added to its logit.", max_length=10_000
    )
    max_tokens: Count | None = about("Maximum tokens to generate; -1: to the end of the context.")
    n_predict: Count | None = about("Another name of max_tokens.")
    min_tokens: Window | None = about("Minimum tokens of the answer.")
    ignore_eos: bool | None = about("Continue after the end-of-sequence token, up to max_tokens.")
    stop_token_ids: list[Natural] | None = about("vLLM: tokens that end the answer.")
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = about("Answers, run in one batch.")
    num_draft_tokens: Natural | None = about("Maximum tokens drafted at a time; 0: none.")
    n_probs: Alternatives | None = about("Log-probabilities with this many alternatives; 0: off.")
    adapters: str | None = about("mlx_lm.server: one of the adapters of the model's file, by name.")
    lora: list[Lora] | None = about("llama.cpp: one of /lora-adapters with scale 1, others with 0.")
    draft_model: str | None = about("mlx_lm.server: one of the draft_models of the model's file.")

    def fill(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)


class Options(SamplingFields):
    """Ollama's object of sampling fields, under the names used here and its own name."""

    n_predict: Annotated[Count | None, BeforeValidator(lambda n: -1 if n == -2 else n)] = about(
        "-1, -2: no limit.", alias="num_predict"
    )
