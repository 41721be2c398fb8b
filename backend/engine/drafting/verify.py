"""One forward pass over a token and the guesses after it; what is right stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import mlx.core as mx

from backend.engine.errors import NotFinite
from backend.engine.kv import RowCache
from common.prefixes import common_prefix

Sample = Callable[[mx.array, mx.array, list[int]], mx.array]


def accepted_count(
    draft: Sequence[int], sampled: Sequence[int], end_tokens: Collection[int] = ()
) -> int:
    """How many guesses are right: those before the first that differs from the sampler's choice.

    sampled: the choice after the token and after each guess, one more than guesses. A guess that
    ends the sequence is not counted: what is sampled there ends it.
    """
    equal = common_prefix(draft, sampled)
    return next((at for at, guess in enumerate(draft[:equal]) if guess in end_tokens), equal)


def verify_step(
    model: Any,
    cache: RowCache,
    token: int,
    draft: Sequence[int],
    sample: Sample,
    step: int,
    end_tokens: Collection[int] = (),
) -> list[int]:
    """Feed a token and its guesses to a cache; returns the 1 to 1 + len(draft) tokens after.

    cache: of one sequence, trimmable (`kv.always_trims`). It ends with `token` and all returned
    tokens but the last, which the next step feeds, as after so many plain steps. step: tokens
    generated up to and including `token` (0: it is the prompt's last). sample(logits [1 + guesses,
    vocabulary], fed [1 + guesses], steps): the sequence's own sampler at successive steps, a
    `BatchSampler` of as many copies of it. Raises NotFinite and what MLX raises; the cache is then
    undefined.
    """
    fed = mx.array([token, *draft], dtype=mx.uint32)
    logits = model(fed[None], cache=cache)[0]
    sampled = sample(logits, fed, list(range(step, step + len(draft) + 1)))
    peaks = mx.max(logits, axis=-1)
    mx.async_eval(sampled, peaks)
    tokens: list[int] = sampled.tolist()  # type: ignore[assignment]
    accepted = accepted_count(draft, tokens, end_tokens)
    if not all(map(math.isfinite, cast(list[float], peaks.tolist())[: accepted + 1])):
        raise NotFinite
    cut_back(cache, len(draft) - accepted)
    return tokens[: accepted + 1]


def cut_back(cache: RowCache, tokens: int) -> None:
    """Forget the latest tokens of a cache that nobody shares.

    Unlike `kv.trim` it keeps the room, or every step would copy the whole cache to grow again.
    """
    if tokens and not all(layer.trim(tokens) == tokens for layer in cache):
        raise ValueError(f"a layer of the cache cannot give back {tokens} tokens")
