"""Chooses the next token of every row in one vectorised pass.

Each row has its own settings and its own random stream, which depends on its seed and on how many
tokens it has generated, and on nothing else: a request gets the same tokens alone or in any batch.
The order is that of llama.cpp's sampler chain: bias and penalties, the filters
(`backend.engine.sampling.filters`), temperature.

Sampling uses the Gumbel-max trick (https://arxiv.org/abs/1611.01144) in two steps: first a block of
neighbouring ids by the block's weight, then a token of that block by its own weight. Each token
keeps its probability, but this takes one random number per block and one per index in a block
instead of one per token of the vocabulary. The noise belongs to ids, not to ranks, so the sampled
token does not change if nearly equal logits swap ranks between batch sizes, or if the filters
compute on fewer tokens.

No function here is compiled with the random state as an input: an exception while such a function
is traced breaks every later evaluation in the process (mlx 0.32.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import mlx.core as mx
import numpy as np

from backend.engine.constraints import masks
from backend.engine.request import Sampling
from backend.engine.sampling.filters import BatchFilters, likelihood, reach
from backend.engine.sampling.penalties import BatchPenalties, Past
from backend.engine.sampling.ranking import in_blocks
from backend.engine.sampling.subset import Subset

_NEVER = float("-inf")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_BLOCK = 256
# Less than any noise except that of the uniform number 0, which is -inf and would exclude even the
# only candidate.
_LEAST_NOISE = -4.0


def row_keys(seeds: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """One random key per row, shape [rows, 2] uint32: splitmix64 of (seed, step)."""
    with np.errstate(over="ignore"):
        state = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
        state = _mixed(state + _GOLDEN)
        state = _mixed(state + _GOLDEN * (np.array(steps, dtype=np.uint64) + np.uint64(1)))
    return state.view(np.uint32).reshape(-1, 2)


def row_uniforms(keys: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per key, shape [rows, 1] float32, independent of the keys' noise."""
    with np.errstate(over="ignore"):
        state = _mixed(keys.reshape(-1).view(np.uint64) + _GOLDEN)
    return ((state >> np.uint64(40)) / np.float32(1 << 24)).astype(np.float32)[:, None]


def _mixed(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _MIX[0]
    state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed


class BatchSampler:
    """Sampler for a fixed set of rows; build a new one when rows join or leave.

    pasts: each row's earlier tokens, which penalties need. end_ids: the end-of-sequence tokens.
    closed: per row, the number of generated tokens before which these cannot be sampled (minimum
    length). constrained: the rows that have a mask.
    """

    def __init__(
        self,
        rows: Sequence[Sampling],
        pasts: Sequence[Past],
        vocabulary: int,
        *,
        end_ids: Sequence[int] = (),
        closed: Sequence[int] = (),
        constrained: Sequence[int] = (),
    ) -> None:
        self._penalties = None
        if any(row.remembers or row.logit_bias for row in rows):
            self._penalties = BatchPenalties(rows, pasts, vocabulary)
        self._closed = closed if end_ids and any(closed) else None
        if self._closed is not None:
            self._ends = mx.array(list(end_ids))
        self._constrained = Subset(constrained, len(rows))
        self._draws = _draws(rows, vocabulary)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept between steps."""
        return self._penalties.nbytes if self._penalties is not None else 0

    def __call__(
        self,
        logits: mx.array,
        fed: mx.array,
        steps: Sequence[int],
        allowed: np.ndarray | None = None,
    ) -> mx.array:
        """Next tokens, shape [rows] uint32.

        logits: [rows, vocabulary], any float type. fed: [rows], the input tokens of this step.
        steps: tokens generated so far, per row. allowed: masks of the constrained rows, in their
        order, [constrained, words] uint32.
        """
        logits = logits.astype(mx.float32)
        if self._penalties is not None:
            logits = self._penalties(logits, fed, steps)
        if self._closed is not None:
            closed = [step < first for step, first in zip(steps, self._closed, strict=True)]
            if any(closed):
                ends = logits[:, self._ends]
                logits[:, self._ends] = mx.where(mx.array(closed)[:, None], _NEVER, ends)
        if self._constrained and allowed is not None:
            own = masks.apply(self._constrained.of(logits), mx.array(allowed))
            logits = self._constrained.put(logits, own)
        tokens = mx.argmax(logits, axis=-1)
        for at, draw in self._draws:
            tokens = at.put(tokens, draw(at.of(logits), [steps[place] for place in at.places]))
        return tokens

    def peaks(self, logits: mx.array, tokens: mx.array) -> mx.array:
        """One value per row, [rows], that is finite only if the row's logits are.

        logits, tokens: the input and output of one call. For greedy rows the logit of the chosen
        token is enough, because `argmax` prefers NaN.
        """
        if self._draws:
            return mx.max(logits, axis=-1)
        return mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]


class _Draw:
    """Samples tokens for a fixed set of rows whose filters have the same reach."""

    def __init__(self, rows: Sequence[Sampling], reach: int) -> None:
        self._rows = rows
        self._filters = BatchFilters(rows, reach)
        self._temperature = mx.array([[row.temperature] for row in rows])

    def __call__(self, logits: mx.array, steps: Sequence[int]) -> mx.array:
        """One token per row, [rows] uint32. logits: [rows, vocabulary] float32."""
        keys = row_keys([row.seed for row in self._rows], steps)
        kept = self._filters(logits, mx.array(row_uniforms(keys)))
        weights = likelihood(kept.logits, self._temperature)
        if kept.ids is not None:
            weights = mx.put_along_axis(mx.zeros(logits.shape), kept.ids, weights, axis=-1)
        tokens = drawn(weights, mx.array(keys))
        if kept.complete is None:
            return tokens
        mx.async_eval(tokens, kept.complete)
        complete = cast(list[bool], kept.complete.tolist())
        short = Subset([at for at, enough in enumerate(complete) if not enough], len(complete))
        if not short:
            return tokens
        again = _Draw([self._rows[at] for at in short.places], logits.shape[-1])
        return short.put(tokens, again(short.of(logits), [steps[at] for at in short.places]))


def drawn(weights: mx.array, keys: mx.array) -> mx.array:
    """Sample one token per row by weight, [rows] uint32.

    weights: [rows, vocabulary] float32, not all 0. keys: [rows, 2] uint32.
    """
    blocks = in_blocks(weights, _BLOCK, 0)
    count = blocks.shape[1]
    noise = mx.vmap(lambda key: mx.random.gumbel(shape=(count + _BLOCK,), key=key))(keys)
    noise = mx.maximum(noise, _LEAST_NOISE)
    block = mx.argmax(mx.log(mx.sum(blocks, axis=-1)) + noise[:, :count], axis=-1)
    inside = mx.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + mx.argmax(mx.log(inside) + noise[:, count:], axis=-1)


def _draws(rows: Sequence[Sampling], vocabulary: int) -> list[tuple[Subset, _Draw]]:
    """The sampled rows (temperature above 0), grouped by the reach of their filters."""
    by_reach: dict[tuple[int, bool], dict[int, Sampling]] = {}
    for at, row in enumerate(rows):
        if row.temperature > 0:
            own = row if row.top_k < vocabulary else replace(row, top_k=0)
            by_reach.setdefault((reach(own, vocabulary), own.top_k > 0), {})[at] = own
    return [
        (Subset(list(group), len(rows)), _Draw(list(group.values()), own_reach))
        for (own_reach, _), group in by_reach.items()
    ]
