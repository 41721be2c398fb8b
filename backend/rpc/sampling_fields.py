"""Converts the sampling fields of PredictOptions to Sampling."""

from __future__ import annotations

import math
import secrets
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.engine.request import WHOLE, Extras, Sampling
from backend.rpc.checks import json_object, require_least, require_most
from common.field_names import named
from common.wording import shown
from wire import backend_pb2 as pb

MAX_TEMPERATURE = 100.0
LARGEST_BIAS = 1e6
MOST_BIASES = 10_000
LARGEST_PENALTY = 100.0
_DEFAULT_WINDOW = 64  # llama.cpp's repeat_last_n
_GREEDY_BELOW = 1e-5  # logits divided by a smaller temperature overflow float32


def sampling(options: pb.PredictOptions, extras: Extras, vocabulary_size: int) -> Sampling:
    return Sampling(
        logit_bias=_logit_bias(options.LogitBias, vocabulary_size),
        repetition=_repetition(options.Penalty),
        window=_window(options.Repeat),
        frequency=_additive("FrequencyPenalty", options.FrequencyPenalty),
        presence=_additive("PresencePenalty", options.PresencePenalty),
        frequency_window=extras.frequency_window,
        presence_window=extras.presence_window,
        temperature=_temperature(options.Temperature),
        top_k=_top_k(options.TopK),
        typical_p=_share("TypicalP", options.TypicalP),
        top_p=_share("TopP", options.TopP),
        min_p=_within("MinP", options.MinP, 0.0, 1.0),
        xtc_probability=extras.xtc_probability,
        xtc_threshold=extras.xtc_threshold,
        seed=_seed(options.Seed),
    )


def _within(name: str, value: float, low: float, high: float) -> float:
    if math.isfinite(value) and low <= value <= high:
        return value
    limits = f"from {low:g} to {high:g}" if math.isfinite(high) else f"not below {low:g}"
    raise InvalidRequest(f"{named(name)} is {value:g}: send a finite number {limits}")


def _temperature(value: float) -> float:
    value = _within("Temperature", value, 0.0, MAX_TEMPERATURE)
    return value if value >= _GREEDY_BELOW else 0.0


def _share(name: str, value: float) -> float:
    """Return a probability mass: 0 means unset, and 1 or more keeps all tokens."""
    value = _within(name, value, 0.0, math.inf)
    return value if 0 < value < 1 else 1.0


def _repetition(value: float) -> float:
    return _within("Penalty", value, 1 / LARGEST_PENALTY, LARGEST_PENALTY) if value else 1.0


def _additive(name: str, value: float) -> float:
    return _within(name, value, -LARGEST_PENALTY, LARGEST_PENALTY)


def _top_k(value: int) -> int:
    require_least("TopK", value, -1, "a positive count, or 0 or -1 to turn it off")
    return max(value, 0)


def _window(value: int) -> int:
    looks_back = f"how many tokens {named('Penalty')} looks back, 0 for {_DEFAULT_WINDOW}"
    require_least("Repeat", value, -1, f"{looks_back}, or -1 for all of them")
    return WHOLE if value == -1 else value or _DEFAULT_WINDOW


def _seed(value: int) -> int:
    """Return the seed: a new one for -1, and a negative number as unsigned."""
    return secrets.randbits(63) if value == -1 else value & 0xFFFF_FFFF


def _logit_bias(text: str, vocabulary_size: int) -> tuple[tuple[int, float], ...]:
    """Parse a JSON object of token id → value added to its logit."""
    given = json_object("LogitBias", text, 'a JSON object such as {"42": -100}')
    require_most("LogitBias", given, MOST_BIASES, "tokens")
    return tuple((_token(key, vocabulary_size), _bias(key, value)) for key, value in given.items())


def _token(key: str, vocabulary_size: int) -> int:
    text = key.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise InvalidRequest(f"{named('LogitBias')} has the key {shown(key)}: send token ids")
    if int(text) >= vocabulary_size:
        raise InvalidRequest(
            f"{named('LogitBias')} names the token {text}, but the model's vocabulary ends at"
            f" {vocabulary_size - 1}",
        )
    return int(text)


def _bias(key: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and abs(value) <= LARGEST_BIAS:
        return float(value)
    raise InvalidRequest(
        f"{named('LogitBias')}[{shown(key)}] is {shown(value)}: send a number from"
        f" {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}",
    )
