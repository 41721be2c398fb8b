"""The fields for sampling and for ending an answer, which chat and completions share.

Names come from OpenAI, llama.cpp's server, mlx_lm.server, MLC-LLM and vLLM. Several names of one
field may be sent if their values agree. The backend gets the request's value, else the model's,
else OpenAI's default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field

from common.field_names import named
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import Strict
from gateway.models.config import ModelConfig
from gateway.tagged import MOST_ENTRIES
from wire import backend_pb2 as pb

MOST_CHOICES = 128  # OpenAI's limit for `n`
MOST_STOPS = 64
_MANY = Field(max_length=MOST_ENTRIES)  # a longer list is refused before its items are checked
MOST_ALTERNATIVES = 20  # OpenAI's limit for `top_logprobs`
MOST_TOKENS = 2**31 - 1
_MOST_BYTES = 128 << 20
_WINDOW = 64  # llama.cpp's repeat_last_n
_DRAW = -1  # the wire's value for a random seed
T = TypeVar("T")
# The names of the protocol's fields in requests. If several are sent, their values must agree, and
# errors contain the first of them.
NAMES: Mapping[str, tuple[str, ...]] = {
    "Tokens": ("max_completion_tokens", "max_tokens", "n_predict"),
    "Penalty": ("repeat_penalty", "repetition_penalty"),
    "Repeat": ("repeat_last_n", "repetition_context_size"),
    "TopLogprobs": ("top_logprobs", "n_probs", "logprobs"),
    "Tools": ("tools", "functions"),
    "ToolChoice": ("tool_choice", "function_call"),
    "StopPrompts": ("stop",),
    "NDraft": ("num_draft_tokens",),
    "ModelIdentity": ("model",),
    "Metadata mlx.thinking_budget": (
        *("thinking_budget", "reasoning_budget", "thinking_budget_tokens"),
        "thinking_token_budget",
    ),
    "Metadata mlx.presence_window": ("presence_context_size",),
    "Metadata mlx.frequency_window": ("frequency_context_size",),
}

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
        "The same seed and request give the same answer; choice i uses seed + i. -1: random.",
        validation_alias=AliasChoices("seed", "random_seed"),  # the latter is Mistral's
    )
    stop: str | Annotated[list[str], _MANY] | None = about(
        f"Up to {MOST_STOPS} texts that end the answer."
    )


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
        None, description="Token id → value added to its logit.", max_length=MOST_ENTRIES
    )
    max_tokens: Count | None = about("Maximum tokens to generate; -1: to the end of the context.")
    n_predict: Count | None = about("Another name of max_tokens.")
    min_tokens: Window | None = about("Minimum tokens of the answer.")
    ignore_eos: bool | None = about("Continue after the end-of-sequence token, up to max_tokens.")
    stop_token_ids: Annotated[list[Natural], _MANY] | None = about(
        "vLLM: tokens that end the answer."
    )
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = about("Answers, run in one batch.")
    num_draft_tokens: Natural | None = about("Maximum tokens drafted at a time; 0: none.")
    n_probs: Alternatives | None = about("Log-probabilities with this many alternatives; 0: off.")
    adapters: str | None = about("mlx_lm.server: one of the adapters of the model's file, by name.")
    lora: Annotated[list[Lora], _MANY] | None = about(
        "llama.cpp: one of /lora-adapters with scale 1, others with 0."
    )
    draft_model: str | None = about("mlx_lm.server: one of the draft_models of the model's file.")

    def fill(self, values: Mapping[str, Any]) -> None:
        """Set those of these fields that the request does not set, under any of their names."""
        own = {name for name in type(self).model_fields if getattr(self, name) is not None}
        groups = [names for field, names in NAMES.items() if field != "TopLogprobs"]
        for name, value in values.items():
            if own.isdisjoint(next((names for names in groups if name in names), (name,))):
                setattr(self, name, value)


class Options(SamplingFields):
    """Ollama's object of sampling fields, under the names used here and its own name."""

    n_predict: Annotated[Count | None, BeforeValidator(lambda n: -1 if n == -2 else n)] = about(
        "-1, -2: no limit.", alias="num_predict"
    )


def write_sampling(options: pb.PredictOptions, fields: SamplingFields, config: ModelConfig) -> None:
    """Write everything except Seed, Tokens and log-probabilities. Raises ApiError."""
    defaults = config.parameters
    options.Temperature = defaults.chosen("temperature", fields.temperature)
    options.TopP = _share(defaults.chosen("top_p", fields.top_p))
    options.TopK = int(defaults.chosen("top_k", fields.top_k))
    options.MinP = defaults.chosen("min_p", fields.min_p)
    options.TypicalP = _share(defaults.chosen("typical_p", fields.typical_p))
    for name in ("presence", "frequency"):  # one with a window of 0 tokens is off
        window = getattr(fields, f"{name}_context_size")
        addend = defaults.chosen(f"{name}_penalty", getattr(fields, f"{name}_penalty"))
        if addend and window != 0:
            setattr(options, f"{name.title()}Penalty", addend)
            if window:
                options.Metadata[f"mlx.{name}_window"] = str(window)
    penalty = given_as(fields, "Penalty")
    options.Repeat = _chosen(given_as(fields, "Repeat"), defaults.repeat_last_n, _WINDOW)
    options.Penalty = defaults.chosen("repeat_penalty", penalty) if options.Repeat else 1.0
    if bias := _chosen(fields.logit_bias, defaults.logit_bias, {}):
        options.LogitBias = json.dumps(bias)
    if fields.stop_token_ids:
        options.Metadata["mlx.stop_token_ids"] = json.dumps(fields.stop_token_ids)
    options.IgnoreEOS = _chosen(fields.ignore_eos, defaults.ignore_eos, False)
    if fields.num_draft_tokens is not None:
        options.NDraft = fields.num_draft_tokens or -1  # on the wire, 0 is the model's own number
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > MOST_STOPS:
        raise bad_field(f"{named('stop')} has {len(stops)} strings: send at most {MOST_STOPS}")
    options.StopPrompts.extend((*stops, *config.stopwords))
    for name in ("min_tokens", "xtc_probability", "xtc_threshold"):
        if (value := getattr(fields, name)) is not None:
            options.Metadata[f"mlx.{name}"] = str(value)


def most_tokens(default: int, *given: tuple[str, int | None]) -> int:
    """Return the limit, on which all its names must agree; 0 if there is none. Raises ApiError."""
    value = agreed(*given)
    return max(default if value is None else value, 0)


def require_few(options: pb.PredictOptions, answers: int) -> None:
    """Raise ApiError if so many copies of these options, one per answer, take too much memory."""
    size = options.ByteSize()
    if answers > 1 and answers * size > _MOST_BYTES:
        raise bad_field(
            f"{answers} answers to a request of {size} bytes are too many: ask for fewer at a time",
            param="n",
        )


def seed_of(fields: SamplingFields, config: ModelConfig, choice: int) -> int:
    """Return the seed of one choice: each has its own, and -1 stays -1.

    A seed of more than 32 bits is reduced to 32.
    """
    seed = _chosen(fields.seed, config.parameters.seed, _DRAW)
    if seed == _DRAW:
        return _DRAW
    seed += choice
    folded = (seed ^ (seed >> 32) if not -(2**31) <= seed < 2**31 else seed) & 0xFFFF_FFFF
    signed = folded - 2**32 if folded >= 2**31 else folded
    return 2**31 - 1 if signed == _DRAW else signed


def agreed(*given: tuple[str, T | None]) -> T | None:
    """Return the value of a field with several names. Raises ApiError if two differ."""
    present = [(name, value) for name, value in given if value is not None]
    for name, value in present[1:]:
        first, chosen = present[0]
        if value != chosen:
            raise bad_field(
                f"{named(first)} is {chosen} and {named(name)} is {value}, but they are two names"
                " for one field: send one of them",
                param=name,
            )
    return present[0][1] if present else None


def given_as(fields: Strict, field: str) -> Any:
    """Return the value of a protocol field under any of its names. Raises ApiError."""
    return agreed(*((name, getattr(fields, name)) for name in NAMES[field]))


def _chosen(given: T | None, default: T | None, otherwise: T) -> T:
    if given is not None:
        return given
    return otherwise if default is None else default


def _share(value: float) -> float:
    """Return a share of probability for the backend, which reads 0 as off.

    A share of 0 keeps only the likeliest token, as does the tiny share that replaces it.
    """
    return value or 1e-6
