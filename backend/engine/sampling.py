"""Chooses the next token of every row in one vectorised pass.

Each row has its own settings and its own random stream, which depends on its seed and on how many
tokens it has generated, and on nothing else: the same request gives the same tokens alone or
among others. The order is that of llama.cpp's sampler chain: bias and penalties, the filters
(`backend.engine.filters`), temperature. The noise (Gumbel-max,
https://arxiv.org/abs/1611.01144) belongs to token ids, not to ranks, so that two nearly equal
logits which swap ranks between batch sizes do not change the draw.

No function here is compiled with the random state as an input: an exception while such a function
is traced breaks every later evaluation in the process (mlx 0.32.4).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from backend.engine.constraints import masks
from backend.engine.filters import BatchFilters
from backend.engine.penalties import BatchPenalties, Past
from backend.engine.request import Sampling
from backend.engine.subset import Subset

_NEVER = float("-inf")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def row_keys(seeds: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """One random key per row, shape [rows, 2] uint32: splitmix64 of (seed, step)."""
    with np.errstate(over="ignore"):
        state = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
        state = _mixed(state + _GOLDEN)
        state = _mixed(state + _GOLDEN * (np.array(steps, dtype=np.uint64) + np.uint64(1)))
    return state.view(np.uint32).reshape(-1, 2)


def row_luck(keys: np.ndarray) -> np.ndarray:
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

    pasts: what is known of each row, for those that have penalties. end_ids: the end-of-sequence
    tokens. closed: per row, before how many generated tokens these cannot be chosen.
    constrained: the rows that a mask is given for.
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
            ends = np.zeros((1, vocabulary), dtype=np.bool_)
            ends[0, list(end_ids)] = True
            self._ends = mx.array(ends)
        self._constrained = Subset(constrained, len(rows))
        self._drawn = Subset([at for at, row in enumerate(rows) if row.temperature > 0], len(rows))
        drawn = [rows[at] for at in self._drawn.places]
        self._seeds = [row.seed for row in drawn]
        if drawn:
            self._temperature = mx.array([[row.temperature] for row in drawn])
            self._filters = BatchFilters(drawn)

    def __call__(
        self,
        logits: mx.array,
        fed: mx.array,
        steps: Sequence[int],
        allowed: np.ndarray | None = None,
    ) -> mx.array:
        """Next tokens, shape [rows] uint32.

        logits: [rows, vocabulary], any float type. fed: [rows], the tokens that led to them.
        steps: tokens generated so far, per row. allowed: masks of the constrained rows, in their
        order, [constrained, words] uint32.
        """
        logits = logits.astype(mx.float32)
        if self._penalties is not None:
            logits = self._penalties(logits, fed, steps)
        if self._closed is not None:
            closed = [step < first for step, first in zip(steps, self._closed, strict=True)]
            if any(closed):
                logits = mx.where(mx.array(closed)[:, None] & self._ends, _NEVER, logits)
        if self._constrained and allowed is not None:
            own = masks.apply(self._constrained.of(logits), mx.array(allowed))
            logits = self._constrained.put(logits, own)
        best = mx.argmax(logits, axis=-1)
        if not self._drawn:
            return best
        return self._drawn.put(best, self._draw(self._drawn.of(logits), steps))

    def _draw(self, logits: mx.array, steps: Sequence[int]) -> mx.array:
        keys = row_keys(self._seeds, [steps[at] for at in self._drawn.places])
        vocabulary = logits.shape[-1]
        noise = mx.vmap(lambda key: mx.random.gumbel(shape=(vocabulary,), key=key))(mx.array(keys))
        kept = self._filters(logits, mx.array(row_luck(keys)))
        # A tiny temperature overflows to infinity; the best token is then the only choice. It is
        # the best one of those that are kept, which XTC may have robbed of the best of all.
        left = mx.where(kept, logits, _NEVER)
        scaled = (left - mx.max(left, axis=-1, keepdims=True)) / self._temperature
        return mx.argmax(mx.where(kept, scaled + noise, _NEVER), axis=-1)
