"""Chooses the next token of every row in one vectorised pass.

Each row has its own settings and its own random stream, which depends on the row's seed and on how
many tokens the row has generated, and on nothing else: a request gets the same tokens alone or in
any batch. The order is that of llama.cpp's sampler chain: bias and penalties, the filters
(`backend.engine.sampling.filters`), temperature.

Sampling uses the Gumbel-max trick (https://arxiv.org/abs/1611.01144) in two steps: it samples a
block of neighbouring ids by the weights of the blocks, then a token of that block by the weights of
the tokens. The probabilities are the same as in one step, but this needs one random number per
block and one per index in a block, instead of one per token of the vocabulary. The noise belongs to
ids, not to ranks, so the sampled token does not change if nearly equal logits swap ranks between
batch sizes, or if the filters compute on fewer tokens.

The functions without state are compiled, so that a GPU gets few kernels and Python does not build
their graph at every step. None of them has MLX's random state as an input: an exception while such
a function is traced breaks every later evaluation in the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import mlx.core as mx
import numpy as np

from backend.engine.constraints.constraint import masked
from backend.engine.device import compiled
from backend.engine.request import Sampling
from backend.engine.sampling.filters import (
    columns,
    filtered,
    in_blocks,
    likelihood,
    reach,
    steepness,
)
from backend.engine.sampling.penalties import BatchPenalties, Past
from backend.engine.sampling.subset import Subset

_NEVER = float("-inf")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_BLOCK = 256
_WIDTH = mx.array(_BLOCK, dtype=mx.uint32)  # an array, because a conversion takes time
# Less than any noise but that of the uniform number 0, which is minus infinity and would exclude
# even the only candidate.
_LEAST_NOISE = -4.0
_STEPS = 16  # steps whose noise is made together
UNFIT = (1 << 32) - 1  # replaces a token that was chosen from logits that are not all finite


def row_keys(seeds: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """Return one random key per row, shape [rows, 2] uint32: splitmix64 of (seed, step)."""
    with np.errstate(over="ignore"):
        state = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
        state = _mixed(state + _GOLDEN)
        state = _mixed(state + _GOLDEN * (np.array(steps, dtype=np.uint64) + np.uint64(1)))
    return state.view(np.uint32).reshape(-1, 2)


def row_uniforms(keys: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) per key, [rows, 1] float32, independent of the keys' noise."""
    with np.errstate(over="ignore"):
        state = _mixed(keys.reshape(-1).view(np.uint64) + _GOLDEN)
    return ((state >> np.uint64(40)) / np.float32(1 << 24)).astype(np.float32)[:, None]


def _mixed(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _MIX[0]
    state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed


class BatchSampler:
    """The sampler of a fixed set of rows; build a new sampler when rows join or leave.

    pasts: each row's earlier tokens, which penalties need.
    end_ids: the end-of-sequence tokens.
    closed: per row, the number of generated tokens before which no end-of-sequence token can be
        sampled (minimum length).
    constrained: the rows that have a mask.
    plain: whether all rows use the best token of unchanged logits.
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
        # Made here, because a GPU would wait for a copy of them at every step. They have a number
        # for each row, because otherwise each step would take time to broadcast them.
        self._most = mx.array([float("inf")] * len(rows))
        self._unfit = mx.array([UNFIT] * len(rows), dtype=mx.uint32)
        # then neither logits in float32 nor `steps` are needed
        self.plain = not (self._draws or self._penalties or self._closed or self._constrained)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that later steps need."""
        nbytes = sum(draw.nbytes for _, draw in self._draws)
        return nbytes + (self._penalties.nbytes if self._penalties is not None else 0)

    def __call__(
        self,
        logits: mx.array,
        fed: mx.array,
        steps: Sequence[int],
        allowed: np.ndarray | None = None,
    ) -> mx.array:
        """Return the next tokens, shape [rows] uint32.

        fed: [rows], the input tokens of this step.
        steps: tokens generated so far, per row.
        allowed: masks of the constrained rows, in their order, [constrained, words] uint32.
        """
        if not self.plain:
            logits = self._changed(logits, fed, steps, allowed)
        if len(self._draws) == 1 and self._draws[0][0].whole:
            return self._draws[0][1](logits, steps)
        tokens = mx.argmax(logits, axis=-1)
        for at, draw in self._draws:
            tokens = at.put(tokens, draw(at.of(logits), [steps[row] for row in at.rows]))
        return tokens

    def checked(self, logits: mx.array, tokens: mx.array) -> mx.array:
        """Return the result of a call, with UNFIT for rows whose logits are not all finite."""
        return _checked(logits, tokens, self._most, self._unfit)

    def _changed(
        self, logits: mx.array, fed: mx.array, steps: Sequence[int], allowed: np.ndarray | None
    ) -> mx.array:
        """Return the logits in float32, with bias, penalties and masks."""
        logits = logits.astype(mx.float32)
        if self._penalties is not None:
            logits = self._penalties(logits, fed, steps)
        if self._closed is not None:
            closed = [step < first for step, first in zip(steps, self._closed, strict=True)]
            if any(closed):
                ends = logits[:, self._ends]
                logits[:, self._ends] = mx.where(mx.array(closed)[:, None], _NEVER, ends)
        if self._constrained and allowed is not None:
            own = masked(self._constrained.of(logits), mx.array(allowed))
            logits = self._constrained.put(logits, own)
        return logits


@compiled
def _checked(logits: mx.array, tokens: mx.array, most: mx.array, unfit: mx.array) -> mx.array:
    return mx.where(mx.abs(mx.max(logits, axis=-1)) < most, tokens, unfit)


class _Draw:
    """Samples tokens for a fixed set of rows whose filters have the same reach."""

    def __init__(self, rows: Sequence[Sampling], reach: int) -> None:
        self._rows, self._reach = rows, reach
        self._columns = columns(rows) | {"steepness": steepness(rows)}
        # for each step that was not used yet, the random numbers by name; the next step's last
        self._random: list[dict[str, mx.array]] = []
        self.nbytes = 0  # of the random numbers of all steps for which they were made together
        self._next: list[int] = []  # the rows' steps for which the last numbers were made

    def __call__(self, logits: mx.array, steps: Sequence[int]) -> mx.array:
        """Return one token per row, [rows] uint32, from float32 logits."""
        random = self._random_of(steps, logits.shape[-1])
        tokens, *complete = _draw(logits, self._reach, self._columns | random)
        if not complete:
            return tokens
        mx.async_eval(tokens, complete)
        enough = cast(list[bool], complete[0].tolist())
        short = Subset([at for at, whole in enumerate(enough) if not whole], len(enough))
        if not short:
            return tokens
        again = _Draw([self._rows[at] for at in short.rows], logits.shape[-1])
        return short.put(tokens, again(short.of(logits), [steps[at] for at in short.rows]))

    def _random_of(self, steps: Sequence[int], vocabulary: int) -> dict[str, mx.array]:
        """Return the noise and, for XTC, the random numbers of a step."""
        if not self._random or steps != self._next:
            # Some samplers are used once.
            count = _STEPS if self._next else 1
            seeds = [row.seed for row in self._rows] * count
            keys = row_keys(seeds, [step + later for later in range(count) for step in steps])
            noise = _noise(mx.array(keys), -(-vocabulary // _BLOCK))
            made = dict(zip(("of_blocks", "inside_blocks"), noise, strict=True))
            if "xtc" in self._columns:
                made["uniform"] = mx.array(row_uniforms(keys))
            self.nbytes = sum(values.nbytes for values in made.values())
            of_steps = zip(*(mx.split(values, count) for values in made.values()), strict=True)
            self._random = [dict(zip(made, numbers, strict=True)) for numbers in of_steps][::-1]
        self._next = [step + 1 for step in steps]
        return self._random.pop()


@compiled
def _noise(keys: mx.array, blocks: int) -> tuple[mx.array, mx.array]:
    """Return random factors for each block, and for each index in a block: e to the Gumbel noise.

    The product of a weight and its factor is greatest where the sum of their logarithms is.
    keys: [n, 2] uint32.
    Returns [n, blocks, 1] and [n, 1, _BLOCK].
    """
    shape = (blocks + _BLOCK,)
    noise = mx.vmap(lambda key: mx.random.gumbel(shape=shape, key=key))(keys)
    factors = mx.exp(mx.maximum(noise, _LEAST_NOISE))
    return factors[:, :blocks, None], factors[:, None, blocks:]


@compiled
def _draw(logits: mx.array, reach: int, columns: dict[str, mx.array]) -> list[mx.array]:
    """Return one token per row and, if the reach is an estimate, whether it was large enough."""
    kept = filtered(logits, reach, columns)
    weights = likelihood(kept.logits, kept.top, columns["steepness"])
    if kept.ids is not None:
        weights = mx.put_along_axis(mx.zeros(logits.shape), kept.ids, weights, axis=-1)
    tokens = _drawn(weights, columns["of_blocks"], columns["inside_blocks"])
    return [tokens] if kept.complete is None else [tokens, kept.complete]


def _drawn(weights: mx.array, of_blocks: mx.array, inside_blocks: mx.array) -> mx.array:
    """Sample one token per row by weight, [rows] uint32; the weights of a row are not all 0."""
    blocks = in_blocks(weights, _BLOCK, 0)
    block = mx.argmax(mx.sum(blocks, axis=-1, keepdims=True) * of_blocks, axis=1, keepdims=True)
    inside = mx.take_along_axis(blocks, block, axis=1)
    index = mx.argmax(inside * inside_blocks, axis=-1, keepdims=True)
    return mx.flatten(block * _WIDTH + index)


def _draws(rows: Sequence[Sampling], vocabulary: int) -> list[tuple[Subset, _Draw]]:
    """Return the sampled rows (temperature above 0), grouped by the reach of their filters."""
    by_reach: dict[tuple[int, bool], dict[int, Sampling]] = {}
    for at, row in enumerate(rows):
        if row.temperature > 0:
            own = row if row.top_k < vocabulary else replace(row, top_k=0)
            by_reach.setdefault((reach(own, vocabulary), own.top_k > 0), {})[at] = own
    return [
        (Subset(list(group), len(rows)), _Draw(list(group.values()), own_reach))
        for (own_reach, _), group in by_reach.items()
    ]
