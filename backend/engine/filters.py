"""Which tokens a row's filters leave to be drawn from, for all rows of one reach in one pass.

The order is that of llama.cpp's sampler chain: top_k, typical_p (https://arxiv.org/abs/2202.00666),
top_p, min_p, XTC; each works on the probabilities, at temperature 1, of what the one before it
left. Every filter leaves at least one token.

A filter that needs tokens in order gets no more of them than the row's reach, because sorting a
vocabulary takes longer than a small model's forward pass on a CPU. The reach follows from the
row's own settings, so no company changes what is computed for a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from backend.engine.device import may_wait_within_a_step
from backend.engine.ranking import best
from backend.engine.request import Sampling

_NEVER = float("-inf")
_EVERY_RANK = (1 << 31) - 1
_LEAST_REACH = 64
_NUCLEUS_REACH = 1024
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the filters left.

    logits: [rows, places] float32; what is out is -inf. ids: [rows, places], the token at each
    place; None: place and id are the same. complete: [rows] bool, whether nothing of what the
    filters keep lies beyond the reach; None: nothing does.
    """

    logits: mx.array
    ids: mx.array | None = None
    complete: mx.array | None = None


def reach(row: Sampling, vocabulary: int) -> int:
    """How many of its best tokens a row's filters look at, in order; 0: all, in no order.

    It is exact for top_k. For top_p it is a guess that holds nearly always, and is checked; where
    the host cannot wait for the check, and for typical_p, it is the vocabulary. min_p and XTC need
    no order; together they are faster on few tokens.
    """
    if 0 < row.top_k < vocabulary:
        return min(max(_LEAST_REACH, 1 << (row.top_k - 1).bit_length()), vocabulary)
    if row.typical_p < 1:
        return vocabulary
    if row.top_p < 1 or (row.min_p > 0 and row.xtc_probability > 0):
        return min(_NUCLEUS_REACH if may_wait_within_a_step() else vocabulary, vocabulary)
    return 0


class BatchFilters:
    """Filters of a fixed set of rows that draw, all of them with the same reach."""

    def __init__(self, rows: Sequence[Sampling], reach: int) -> None:
        self._reach = reach
        self._top_k = _column(rows, "top_k", 0, _EVERY_RANK)
        self._typical_p = _column(rows, "typical_p", 1)
        self._top_p = _column(rows, "top_p", 1)
        self._min_p = _column(rows, "min_p", 0)
        self._xtc = _column(rows, "xtc_probability", 0)
        self._xtc_threshold = mx.array([[row.xtc_threshold] for row in rows])

    def __call__(self, logits: mx.array, luck: mx.array) -> Candidates:
        """What is left of the logits.

        logits: [rows, vocabulary] float32; what is -inf is never left. luck: [rows, 1] numbers in
        [0, 1), each row's own; below xtc_probability, XTC takes part.
        """
        ids = complete = None
        left = logits
        if self._reach:
            ids = best(logits, self._reach)
            left = mx.take_along_axis(logits, ids, axis=-1)
        if self._top_k is not None:
            left = _only(mx.arange(self._reach) < self._top_k, left)
        if self._typical_p is not None:
            left = _only(_typical(_shares(left), self._typical_p), left)
        if self._top_p is not None:
            weight = likelihood(left)
            upto = mx.cumsum(weight, axis=-1)
            wanted = self._top_p * self._total(logits, upto)
            # What is kept first always stays, also where rounding or a tiny top_p would drop it.
            # And who does not use the filter keeps all, whatever the sum of shares rounds to.
            before = upto - weight
            left = _only((before < wanted) | (before <= 0) | (self._top_p >= 1), left)
        if self._min_p is not None:
            least = mx.max(left, axis=-1, keepdims=True) + mx.log(self._min_p)
            left = _only(left >= least, left)
        if self._guesses(logits):
            # Filters that were given no other bound keep what comes first: once one is out, so
            # are all after it.
            complete = left[:, -1] == _NEVER
        if self._xtc is not None:
            out = _excluded(left, self._xtc_threshold)
            left = _only(~(out & (luck < self._xtc)), left)
        return Candidates(left, ids, complete)

    def _guesses(self, logits: mx.array) -> bool:
        """Whether a row's filters may keep tokens beyond the reach."""
        return self._top_k is None and 0 < self._reach < logits.shape[-1]

    def _total(self, logits: mx.array, upto: mx.array) -> mx.array:
        """The weight of all tokens that top_p chooses from."""
        if self._guesses(logits):
            return mx.sum(likelihood(logits), axis=-1, keepdims=True)
        return upto[:, -1:]


def likelihood(logits: mx.array, temperature: mx.array | float = 1.0) -> mx.array:
    """Each token's probability over that of its row's best, of the logits' shape.

    It is a power of 2 because MLX's exp takes three times as long on an x86 CPU. A tiny
    temperature overflows to infinity; the best token then is the only choice.
    """
    below = logits - mx.max(logits, axis=-1, keepdims=True)
    return mx.power(2.0, below / temperature * _LOG2_E)


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


def _only(kept: mx.array, logits: mx.array) -> mx.array:
    return mx.where(kept, logits, _NEVER)


def _shares(logits: mx.array) -> mx.array:
    weight = likelihood(logits)
    return weight / mx.sum(weight, axis=-1, keepdims=True)


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


def _excluded(logits: mx.array, threshold: mx.array) -> mx.array:
    """XTC ("exclude top choices", oobabooga/text-generation-webui#6335): all likely but the last.

    With fewer than two likely tokens nothing is excluded.
    """
    likely = (_shares(logits) >= threshold) & (logits > _NEVER)
    lowest = mx.min(mx.where(likely, logits, float("inf")), axis=-1, keepdims=True)
    # Equal logits stand in the order of their ids, whether the places are ranks or ids.
    place = mx.arange(logits.shape[-1])
    last = mx.max(mx.where(likely & (logits == lowest), place, -1), axis=-1, keepdims=True)
    return likely & (place != last)
