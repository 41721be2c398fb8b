"""Chooses the next token of every row in one vectorised pass.

Each row has its own settings and its own random stream, which depends on its seed and on how many
tokens it has generated, and on nothing else: the same request gives the same tokens alone or
among others. Filters follow llama.cpp's sampler chain, whose fields these are: top_k, top_p on
what top_k left, min_p relative to the best token, temperature last. The noise (Gumbel-max,
https://arxiv.org/abs/1611.01144) belongs to token ids, not to ranks, so that two nearly equal
logits which swap ranks between batch sizes do not change the draw.

No function here is compiled with the random state as an input: an exception while such a function
is traced breaks every later evaluation in the process (mlx 0.32.4).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from backend.engine.request import Sampling

_NEVER = float("-inf")
_EVERY_RANK = (1 << 31) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def row_keys(seeds: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """One random key per row, shape [rows, 2] uint32: splitmix64 of (seed, step)."""
    with np.errstate(over="ignore"):
        state = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
        state = _mixed(state + _GOLDEN)
        state = _mixed(state + _GOLDEN * (np.array(steps, dtype=np.uint64) + np.uint64(1)))
    return state.view(np.uint32).reshape(-1, 2)


def _mixed(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _MIX[0]
    state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed


class BatchSampler:
    """Sampler for a fixed set of rows; build a new one when rows join or leave.

    banned: per row, token ids that may not be chosen (IgnoreEOS), or None.
    """

    def __init__(self, rows: Sequence[Sampling], banned: Sequence[mx.array | None]) -> None:
        self._banned = banned if any(ids is not None for ids in banned) else None
        self._drawn = [at for at, row in enumerate(rows) if row.temperature > 0]
        drawn = [rows[at] for at in self._drawn]
        self._seeds = [row.seed for row in drawn]
        self._index = mx.array(self._drawn)
        self._temperature = mx.array([[row.temperature] for row in drawn])
        self._top_k = self._top_p = self._min_p = None
        if any(row.top_k > 0 for row in drawn):
            self._top_k = mx.array([[row.top_k or _EVERY_RANK] for row in drawn])
        if any(row.top_p < 1 for row in drawn):
            self._top_p = mx.array([[row.top_p] for row in drawn])
        if any(row.min_p > 0 for row in drawn):
            self._min_p = mx.log(mx.array([[row.min_p] for row in drawn]))

    def __call__(self, logits: mx.array, steps: Sequence[int]) -> mx.array:
        """Next tokens, shape [rows] uint32.

        logits: [rows, vocabulary], any float type. steps: tokens generated so far, per row.
        """
        logits = self._without_banned(logits.astype(mx.float32))
        best = mx.argmax(logits, axis=-1)
        if not self._drawn:
            return best
        own = logits if len(self._drawn) == logits.shape[0] else logits[self._index]
        keys = mx.array(row_keys(self._seeds, [steps[at] for at in self._drawn]))
        vocabulary = own.shape[-1]
        noise = mx.vmap(lambda key: mx.random.gumbel(shape=(vocabulary,), key=key))(keys)
        # A tiny temperature overflows to infinity; the best token is then the only choice.
        scaled = (own - mx.max(own, axis=-1, keepdims=True)) / self._temperature
        chosen = mx.argmax(mx.where(self._kept(own), scaled + noise, _NEVER), axis=-1)
        if len(self._drawn) == logits.shape[0]:
            return chosen
        best[self._index] = chosen
        return best

    def _without_banned(self, logits: mx.array) -> mx.array:
        if self._banned is not None:
            for row, ids in enumerate(self._banned):
                if ids is not None:
                    logits[row, ids] = _NEVER
        return logits

    def _kept(self, logits: mx.array) -> mx.array:
        """Which tokens the filters leave, as a boolean array of the logits' shape."""
        kept = logits > _NEVER
        if self._top_k is not None or self._top_p is not None:
            kept = kept & self._kept_by_rank(logits)
        if self._min_p is not None:
            kept = kept & (logits >= mx.max(logits, axis=-1, keepdims=True) + self._min_p)
        return kept

    def _kept_by_rank(self, logits: mx.array) -> mx.array:
        order = mx.argsort(-logits, axis=-1)
        ranked = mx.take_along_axis(logits, order, axis=-1)
        kept = mx.ones(ranked.shape, dtype=mx.bool_)
        if self._top_k is not None:
            kept = mx.arange(ranked.shape[-1])[None] < self._top_k
        if self._top_p is not None:
            share = mx.softmax(mx.where(kept, ranked, _NEVER), axis=-1)
            before = mx.cumsum(share, axis=-1) - share
            # Rank 0 always stays, also where rounding or a tiny top_p would empty the set.
            kept = kept & ((before < self._top_p) | (mx.arange(ranked.shape[-1])[None] == 0))
        return mx.put_along_axis(mx.zeros(kept.shape, dtype=mx.bool_), order, kept, axis=-1)
