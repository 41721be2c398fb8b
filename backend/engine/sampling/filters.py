"""Sampling filters: which tokens may be sampled. Rows with the same reach run in one pass.

The order is that of llama.cpp's sampler chain: top_k, typical_p (https://arxiv.org/abs/2202.00666),
top_p, min_p, XTC. Each filter uses the probabilities, at temperature 1, of the tokens that the
filter before it kept. Every filter keeps at least one token.

A filter that needs sorted tokens sees only the row's best tokens, as many as its *reach*, because
sorting a vocabulary takes longer than a small model's forward pass on a CPU. The reach depends only
on the row's own settings, so the other rows of a batch do not change a row's result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from backend.engine import device
from backend.engine.request import Sampling
from backend.engine.sampling.ranking import best

_NEVER = float("-inf")
_EVERY_RANK = (1 << 31) - 1
_LEAST_REACH = 64
_NUCLEUS_REACH = 1024
_LEAST_SHARE = 1e-30
# Arrays, because making one of a number takes as long as an operation.
_REMOVED, _TWO, _LOG2_E = map(mx.array, (_NEVER, 2.0, 1.4426950408889634))


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that the filters kept.

    logits: [rows, n] float32; -inf for removed tokens.
    ids: [rows, n], the token of each column; None if the column is the token id.
    complete: [rows] bool, whether no token beyond the reach would have been kept; None if that
        holds for all rows.
    """

    logits: mx.array
    ids: mx.array | None = None
    complete: mx.array | None = None


def reach(row: Sampling, vocabulary: int) -> int:
    """The number of best tokens, sorted, that a row's filters see; 0 if no filter needs an order.

    It is exact for top_k. For top_p it is an estimate that is nearly always enough and is checked
    afterwards (`Candidates.complete`). For typical_p, and for top_p where the host cannot wait for
    that check, it is the whole vocabulary, of which only the logits are sorted. min_p and XTC need
    no order, but are faster on few tokens if both are set.
    """
    if 0 < row.top_k < vocabulary:
        return min(max(_LEAST_REACH, 1 << (row.top_k - 1).bit_length()), vocabulary)
    if row.typical_p < 1:
        return vocabulary
    if row.top_p < 1 or (row.min_p > 0 and row.xtc_probability > 0):
        return min(_NUCLEUS_REACH if device.may_wait_within_a_step() else vocabulary, vocabulary)
    return 0


def search_all(row: Sampling, vocabulary: int) -> bool:
    """Return whether a row's filters may work on the whole vocabulary, or on much of it."""
    if row.temperature <= 0 or 0 < row.top_k <= vocabulary // 16:
        return False
    return row.top_k > 0 or row.typical_p < 1 or row.top_p < 1 or row.xtc_probability > 0


def columns(rows: Sequence[Sampling]) -> dict[str, mx.array]:
    """Return the settings of the rows by name, [rows, 1] each, without filters that no row uses."""
    found = {
        "top_k": _column(rows, "top_k", 0, _EVERY_RANK),
        "typical_p": _column(rows, "typical_p", 1),
        # A tiny top_p keeps the best token. A row without top_p keeps all tokens, whatever their
        # probabilities add up to.
        "top_p": _column(rows, "top_p", 1, float("inf"), least=_LEAST_SHARE),
        "min_p": _column(rows, "min_p", 0),
        "xtc": _column(rows, "xtc_probability", 0),
    }
    if found["xtc"] is not None:
        found["xtc_threshold"] = mx.array([[row.xtc_threshold] for row in rows])
    return {name: column for name, column in found.items() if column is not None}


def filtered(logits: mx.array, reach: int, columns: Mapping[str, mx.array]) -> Candidates:
    """Apply the filters of rows that have the same reach.

    logits: [rows, vocabulary] float32; tokens with -inf are never kept. columns: what the function
    of that name returns and, with XTC, `uniform`, [rows, 1]: a random number in [0, 1) for each
    row. XTC runs if it is below the row's xtc_probability.
    """
    ids = complete = None
    left = logits
    # whether the filters may keep tokens beyond the reach
    guesses = "top_k" not in columns and 0 < reach < logits.shape[-1]
    if "top_k" in columns or guesses:
        ids = best(logits, reach)
        left = mx.take_along_axis(logits, ids, axis=-1)
    if "top_k" in columns:
        left = _only(mx.arange(reach) < columns["top_k"], left)
    if "typical_p" in columns:
        left = _only(_typical(_shares(left), columns["typical_p"]), left)
    if "top_p" in columns:
        total = mx.sum(likelihood(logits), -1, keepdims=True) if guesses else None
        left = _only(_nucleus(left, columns["top_p"], total, in_order=ids is not None), left)
    if "min_p" in columns:
        least = mx.max(left, axis=-1, keepdims=True) + mx.log(columns["min_p"])
        left = _only(left >= least, left)
    if guesses:
        # Without top_k, the filters keep the best tokens: if the last one of the reach was removed,
        # all tokens beyond it would be too.
        complete = left[:, -1] == _NEVER
    if "xtc" in columns:
        out = _excluded(left, columns["xtc_threshold"])
        left = _only(~(out & (columns["uniform"] < columns["xtc"])), left)
    return Candidates(left, ids, complete)


def likelihood(logits: mx.array, temperature: mx.array | None = None) -> mx.array:
    """Each token's probability relative to that of the row's best token, in the logits' shape.

    It is computed as a power of 2 because MLX's exp takes three times as long on an x86 CPU. With a
    tiny temperature the exponent becomes -infinity, which leaves only the best token.
    """
    below = logits - mx.max(logits, axis=-1, keepdims=True)
    if temperature is not None:
        below = below / temperature
    return mx.power(_TWO, below * _LOG2_E)


def _column(
    rows: Sequence[Sampling],
    name: str,
    off: float,
    instead: float | None = None,
    least: float = 0.0,
) -> mx.array | None:
    """Return a setting of every row, shape [rows, 1], or None where it is off for all of them.

    instead: replaces the value `off`.
    least: replaces smaller values, if `instead` is given.
    """
    values = [getattr(row, name) for row in rows]
    if all(value == off for value in values):
        return None
    if instead is not None:
        values = [instead if value == off else max(value, least) for value in values]
    return mx.array(values)[:, None]


def _only(kept: mx.array, logits: mx.array) -> mx.array:
    return mx.where(kept, logits, _REMOVED)


def _shares(logits: mx.array) -> mx.array:
    weight = likelihood(logits)
    return weight / mx.sum(weight, axis=-1, keepdims=True)


def _typical(share: mx.array, most: mx.array) -> mx.array:
    """Return a mask of the tokens whose information is nearest to the entropy.

    Tokens are added until their probabilities reach `most`.
    """
    information = -mx.log(mx.maximum(share, 1e-38))
    entropy = mx.sum(share * information, axis=-1, keepdims=True)
    strange = mx.where(share > 0, mx.abs(information - entropy), float("inf"))
    order = mx.argsort(strange, axis=-1)
    ordered = mx.take_along_axis(share, order, axis=-1)
    before = mx.cumsum(ordered, axis=-1) - ordered
    kept = (before < most) | (before <= 0) | (most >= 1)
    return mx.put_along_axis(mx.zeros(kept.shape, dtype=mx.bool_), order, kept, axis=-1)


def _nucleus(left: mx.array, most: mx.array, total: mx.array | None, *, in_order: bool) -> mx.array:
    """Return a mask of the best tokens, up to the one with which their probabilities reach `most`.

    left: the logits to choose from, best first if `in_order`. Otherwise a copy of the logits is
    sorted without their ids, with which it would take twice the memory: the mask is that of the
    logits above the worst that is kept, and of the first ones equal to it. total: the sum of the
    weights of all tokens, if `left` has only the best.
    """
    rising = left[:, ::-1] if in_order else mx.sort(left, axis=-1)
    weight = likelihood(rising)
    # Before the first token, nothing adds up: it is kept whatever rounding does.
    before = mx.cumsum(weight, axis=-1, reverse=True, inclusive=False)
    if total is None:
        total = mx.sum(weight, axis=-1, keepdims=True)
    kept = before < most * total
    if in_order:
        return kept[:, ::-1]
    count = mx.sum(kept, axis=-1, keepdims=True)
    worst = mx.take_along_axis(rising, rising.shape[-1] - count, axis=-1)
    above, equal = left > worst, left == worst
    room = count - mx.sum(above, axis=-1, keepdims=True)
    return mx.where(equal, mx.cumsum(equal, axis=-1) <= room, above)


def _excluded(logits: mx.array, threshold: mx.array) -> mx.array:
    """XTC ("exclude top choices", oobabooga/text-generation-webui#6335).

    A mask of all tokens above the threshold except the least likely of them. With fewer than two
    such tokens, none is excluded.
    """
    likely = (_shares(logits) >= threshold) & (logits > _NEVER)
    lowest = mx.min(mx.where(likely, logits, float("inf")), axis=-1, keepdims=True)
    # Equal logits are in the order of their ids, whether columns are sorted or are ids.
    place = mx.arange(logits.shape[-1])
    last = mx.max(mx.where(likely & (logits == lowest), place, -1), axis=-1, keepdims=True)
    return likely & (place != last)
