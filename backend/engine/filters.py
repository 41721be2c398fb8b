"""Which tokens a row's filters leave to be drawn from, for all rows in one pass.

The order is that of llama.cpp's sampler chain: top_k, typical_p (https://arxiv.org/abs/2202.00666),
top_p, min_p, XTC; each works on the probabilities, at temperature 1, of what the one before it
left. Every filter leaves at least one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from backend.engine.request import Sampling

_NEVER = float("-inf")
_EVERY_RANK = (1 << 31) - 1


class BatchFilters:
    """Filters of a fixed set of rows that draw."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self._top_k = _column(rows, "top_k", 0, _EVERY_RANK)
        self._typical_p = _column(rows, "typical_p", 1)
        self._top_p = _column(rows, "top_p", 1)
        self._min_p = _column(rows, "min_p", 0)
        self._xtc = _column(rows, "xtc_probability", 0)
        self._xtc_threshold = mx.array([[row.xtc_threshold] for row in rows])
        self._ranked = any(
            column is not None for column in (self._top_k, self._typical_p, self._top_p, self._xtc)
        )

    def __call__(self, logits: mx.array, luck: mx.array) -> mx.array:
        """Which tokens are left: boolean, of the logits' shape.

        logits: [rows, vocabulary] float32; what is -inf is never left. luck: [rows, 1] numbers in
        [0, 1), each row's own; below xtc_probability, XTC takes part.
        """
        if not self._ranked:
            kept = logits > _NEVER
            return kept if self._min_p is None else kept & self._likely(logits)
        order = mx.argsort(-logits, axis=-1)
        ranked = mx.take_along_axis(logits, order, axis=-1)
        kept = ranked > _NEVER
        rank = mx.arange(ranked.shape[-1])[None]
        if self._top_k is not None:
            kept = kept & (rank < self._top_k)
        if self._typical_p is not None:
            kept = kept & _typical(_shares(ranked, kept), self._typical_p)
        if self._top_p is not None:
            share = _shares(ranked, kept)
            before = mx.cumsum(share, axis=-1) - share
            # What is kept first always stays, also where rounding or a tiny top_p would drop it.
            # And who does not use the filter keeps all, whatever the sum of shares rounds to.
            kept = kept & ((before < self._top_p) | (before <= 0) | (self._top_p >= 1))
        if self._min_p is not None:
            kept = kept & self._likely(mx.where(kept, ranked, _NEVER))
        if self._xtc is not None:
            out = _excluded(_shares(ranked, kept), self._xtc_threshold)
            kept = kept & ~(out & (luck < self._xtc))
        return mx.put_along_axis(mx.zeros(kept.shape, dtype=mx.bool_), order, kept, axis=-1)

    def _likely(self, logits: mx.array) -> mx.array:
        assert self._min_p is not None
        return logits >= mx.max(logits, axis=-1, keepdims=True) + mx.log(self._min_p)


def _column(
    rows: Sequence[Sampling], name: str, off: float, instead: float | None = None
) -> mx.array | None:
    """A setting of every row, shape [rows, 1], or None where it is off for all of them."""
    values = [getattr(row, name) for row in rows]
    if all(value == off for value in values):
        return None
    if instead is not None:
        values = [instead if value == off else value for value in values]
    return mx.array(values)[:, None]


def _shares(ranked: mx.array, kept: mx.array) -> mx.array:
    return mx.softmax(mx.where(kept, ranked, _NEVER), axis=-1)


def _typical(share: mx.array, most: mx.array) -> mx.array:
    """The tokens whose information is nearest to the mean, until their shares reach `most`."""
    information = -mx.log(mx.maximum(share, 1e-38))
    entropy = mx.sum(share * information, axis=-1, keepdims=True)
    strange = mx.where(share > 0, mx.abs(information - entropy), float("inf"))
    order = mx.argsort(strange, axis=-1)
    ordered = mx.take_along_axis(share, order, axis=-1)
    before = mx.cumsum(ordered, axis=-1) - ordered
    kept = (before < most) | (before <= 0) | (most >= 1)
    return mx.put_along_axis(mx.zeros(kept.shape, dtype=mx.bool_), order, kept, axis=-1)


def _excluded(share: mx.array, threshold: mx.array) -> mx.array:
    """XTC ("exclude top choices", oobabooga/text-generation-webui#6335): all likely but the last.

    share: [rows, ranks], descending. With fewer than two likely tokens nothing is excluded.
    """
    likely = share >= threshold
    return likely & (mx.cumsum(likely.astype(mx.int32), axis=-1) < mx.sum(likely, axis=-1)[:, None])
