"""SamplingFields → PredictOptions: the request's value, else the model's, else OpenAI's default."""

from __future__ import annotations

import json
from typing import TypeVar

from common.field_names import named
from gateway.errors import bad_field
from gateway.models.config import ModelConfig, Parameters
from gateway.openai.sampling_fields import MOST_STOPS, SamplingFields
from wire import backend_pb2 as pb

T = TypeVar("T")
_WINDOW = 64  # llama.cpp's repeat_last_n
_MOST_BYTES = 128 << 20
_DRAW = -1  # the wire's value for a random seed


def write_sampling(options: pb.PredictOptions, fields: SamplingFields, config: ModelConfig) -> None:
    """Write everything except Seed, Tokens and log-probabilities. Raises ApiError."""
    defaults = config.parameters
    options.Temperature = defaults.chosen("temperature", fields.temperature)
    options.TopP = _share(defaults.chosen("top_p", fields.top_p))
    options.TopK = int(defaults.chosen("top_k", fields.top_k))
    options.MinP = defaults.chosen("min_p", fields.min_p)
    options.TypicalP = _share(defaults.chosen("typical_p", fields.typical_p))
    _write_addends(options, fields, defaults)
    _write_repetition(options, fields, defaults)
    if bias := _first(fields.logit_bias, defaults.logit_bias, {}):
        options.LogitBias = json.dumps(bias)
    if fields.stop_token_ids:
        options.Metadata["mlx.stop_token_ids"] = json.dumps(fields.stop_token_ids)
    options.IgnoreEOS = _first(fields.ignore_eos, defaults.ignore_eos, False)
    if fields.num_draft_tokens is not None:
        options.NDraft = fields.num_draft_tokens or -1  # on the wire, 0 is the model's own number
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > MOST_STOPS:
        raise bad_field(f"{named('stop')} has {len(stops)} texts: send at most {MOST_STOPS}")
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

    Seeds that are too large are reduced.
    """
    seed = _first(fields.seed, config.parameters.seed, _DRAW)
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
        if value != present[0][1]:
            raise bad_field(
                f"{present[0][0]} is {present[0][1]} and {named(name)} is {value}, but they are"
                " two names for one field: send one of them",
            )
    return present[0][1] if present else None


def _first(given: T | None, default: T | None, otherwise: T) -> T:
    if given is not None:
        return given
    return otherwise if default is None else default


def _share(value: float) -> float:
    """Return a share of probability for the backend, which reads 0 as off.

    A share of 0 keeps only the likeliest token, as does the tiny share that replaces it.
    """
    return value or 1e-6


def _write_addends(
    options: pb.PredictOptions, fields: SamplingFields, defaults: Parameters
) -> None:
    """Write the additive penalties; one with a window of 0 tokens is off."""
    for name in ("presence", "frequency"):
        window = getattr(fields, f"{name}_context_size")
        penalty = defaults.chosen(f"{name}_penalty", getattr(fields, f"{name}_penalty"))
        if penalty and window != 0:
            setattr(options, f"{name.title()}Penalty", penalty)
            if window:
                options.Metadata[f"mlx.{name}_window"] = str(window)


def _write_repetition(
    options: pb.PredictOptions, fields: SamplingFields, defaults: Parameters
) -> None:
    penalty = agreed(
        ("repeat_penalty", fields.repeat_penalty), ("repetition_penalty", fields.repetition_penalty)
    )
    window = agreed(
        ("repeat_last_n", fields.repeat_last_n),
        ("repetition_context_size", fields.repetition_context_size),
    )
    window = _first(window, defaults.repeat_last_n, _WINDOW)
    options.Penalty = defaults.chosen("repeat_penalty", penalty) if window else 1.0
    options.Repeat = window
