"""Sampling filters, which remove tokens that must not be sampled.

The order is that of llama.cpp's sampler chain: top_k, typical_p (https://arxiv.org/abs/2202.00666),
top_p, min_p, XTC. Each filter uses the probabilities, at temperature 1, of the tokens that the
filter before it kept. Every filter keeps at least one token.

A filter that needs sorted tokens sees only the row's best tokens. Their number, the *reach* of the
row, is limited because sorting a vocabulary takes longer than a small model's forward pass on a
CPU. The reach depends only on the row's own settings, so the other rows of a batch do not change a
row's result. Rows with the same reach are filtered together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

import mlx.core as mx
import numpy as np

from backend.engine import device
from backend.engine.request import Sampling

_NEVER = float("-inf")
_EVERY_RANK = (1 << 31) - 1
_ID_BITS = 32
_ID = (1 << _ID_BITS) - 1
_SMALLEST_BLOCK = 4
_LEAST_REACH = 64
_NUCLEUS_REACH = 1024
_LEAST_SHARE = 1e-30
# Arrays, because converting a number into an array takes as long as an operation.
_REMOVED, _TWO = mx.array(_NEVER), mx.array(2.0)
_LOG2_E = 1.4426950408889634
_AT_ONE = mx.array(_LOG2_E)
_MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that the filters kept.

    logits: [rows, n] float32; -inf for removed tokens.
    ids: [rows, n], the token of each column; None if the column is the token id.
    complete: [rows] bool, whether the filters would have removed all tokens beyond the reach; None
        if that is certain for all rows.
    top: the highest of the logits, [rows, 1]; None if it is not known.
    """

    logits: mx.array
    ids: mx.array | None = None
    complete: mx.array | None = None
    top: mx.array | None = None


def reach(row: Sampling, vocabulary: int) -> int:
    """Return how many of the best tokens a row's filters see, sorted; 0 if none needs an order.

    For top_k the number is exact. For top_p it is an estimate that is nearly always enough and is
    checked afterwards (`Candidates.complete`). For typical_p, and for top_p on a device where the
    host should not wait for that check, it is the whole vocabulary, of which only the logits are
    sorted. min_p and XTC need no order, but are faster on few tokens if both are set.
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

    logits: [rows, vocabulary] float32; tokens with -inf are never kept.
    reach: the reach of all rows.
    columns: the result of `columns` and, with XTC, `uniform`, [rows, 1]: a random number in [0, 1)
        for each row. XTC runs if that number is below the row's xtc_probability.
    """
    ids = complete = top = None
    left = logits
    # whether the filters might keep tokens beyond the reach
    estimated = "top_k" not in columns and 0 < reach < logits.shape[-1]
    if "top_k" in columns or estimated:
        ids = best(logits, reach)
        left = mx.take_along_axis(logits, ids, axis=-1)
    if "top_k" in columns:
        left = _only(mx.arange(reach) < columns["top_k"], left)
    if "typical_p" in columns:
        left = _only(_typical(_shares(left), columns["typical_p"]), left)
    if not ("typical_p" in columns or "xtc" in columns):  # which may remove the best token
        top = mx.max(logits, axis=-1, keepdims=True) if ids is None else left[:, :1]
    if "top_p" in columns:
        total = mx.sum(likelihood(logits, top), -1, keepdims=True) if estimated else None
        kept = _nucleus(left, top, columns["top_p"], total, in_order=ids is not None)
        left = _only(kept, left)
    if "min_p" in columns:
        least = mx.max(left, axis=-1, keepdims=True) + mx.log(columns["min_p"])
        left = _only(left >= least, left)
    if estimated:
        # Without top_k, the filters keep the best tokens: if the last token of the reach was
        # removed, all tokens beyond the reach would be removed too.
        complete = left[:, -1] == _NEVER
    if "xtc" in columns:
        out = _excluded(left, columns["xtc_threshold"])
        left = _only(~(out & (columns["uniform"] < columns["xtc"])), left)
    return Candidates(left, ids, complete, top)


def likelihood(
    logits: mx.array, top: mx.array | None = None, steepness: mx.array = _AT_ONE
) -> mx.array:
    """Return each token's probability, divided by that of the row's best token.

    The result is a power of 2, because MLX's exp takes three times as long on an x86 CPU.
    logits: [rows, n], the shape of the result.
    top: the highest of the logits, [rows, 1], if it is known.
    steepness: the result of `steepness`, [rows, 1]; by default that of temperature 1.
    """
    below = logits - (mx.max(logits, axis=-1, keepdims=True) if top is None else top)
    return mx.power(_TWO, below * steepness)


def steepness(rows: Sequence[Sampling]) -> mx.array:
    """Return the factors by which `likelihood` applies the temperatures, [rows, 1].

    With a tiny temperature the exponents become -infinity, except that of the best token, which
    must stay 0: so the factor is finite.
    """
    return mx.array([[min(_LOG2_E / row.temperature, _MOST)] for row in rows])


def _column(
    rows: Sequence[Sampling],
    name: str,
    off: float,
    instead: float | None = None,
    least: float = 0.0,
) -> mx.array | None:
    """Return a setting of every row, shape [rows, 1], or None if all rows have it off.

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

    share: the tokens' probabilities; the sum of those that are kept reaches `most`.
    """
    information = -mx.log(mx.maximum(share, 1e-38))
    entropy = mx.sum(share * information, axis=-1, keepdims=True)
    strange = mx.where(share > 0, mx.abs(information - entropy), float("inf"))
    order = mx.argsort(strange, axis=-1)
    ordered = mx.take_along_axis(share, order, axis=-1)
    before = mx.cumsum(ordered, axis=-1) - ordered
    kept = (before < most) | (before <= 0) | (most >= 1)
    return mx.put_along_axis(mx.zeros(kept.shape, dtype=mx.bool_), order, kept, axis=-1)


def _nucleus(
    left: mx.array,
    top: mx.array | None,
    most: mx.array,
    total: mx.array | None,
    *,
    in_order: bool,
) -> mx.array:
    """Return a mask of the best tokens, the fewest whose probabilities together reach `most`.

    Logits that are not in order are copied and sorted without their ids, which would take twice the
    memory. The mask then has the logits above the worst that is kept, and the first of those that
    are equal to the worst.
    top: the highest of the logits, [rows, 1], if it is known.
    total: the sum of the weights of all tokens, if `left` has only the best tokens.
    in_order: whether `left` has the best token first.
    """
    rising = left[:, ::-1] if in_order else mx.sort(left, axis=-1)
    weight = likelihood(rising, top)
    # The sum before the best token is exactly 0, so that token is kept, whatever rounding does.
    before = mx.cumsum(weight, axis=-1, reverse=True, inclusive=False)
    if total is None:
        total = mx.sum(weight, axis=-1, keepdims=True)
    kept = before < most * total
    if in_order:
        return kept[:, ::-1]
    count = mx.sum(kept, axis=-1, keepdims=True)
    worst = mx.take_along_axis(rising, -count, axis=-1)
    above, equal = left > worst, left == worst
    equals = count - mx.sum(above, axis=-1, keepdims=True)  # how many equal logits are kept
    return mx.where(equal, mx.cumsum(equal, axis=-1) <= equals, above)


def _excluded(logits: mx.array, threshold: mx.array) -> mx.array:
    """Return the mask of the tokens that XTC removes: all likely tokens but the least likely.

    XTC means "exclude top choices" (oobabooga/text-generation-webui#6335). A token is likely if its
    probability is at least the threshold, [rows, 1]. With fewer than two likely tokens, none is
    removed.
    """
    likely = (_shares(logits) >= threshold) & (logits > _NEVER)
    lowest = mx.min(mx.where(likely, logits, float("inf")), axis=-1, keepdims=True)
    # Equal logits stay in the order of their ids, in sorted columns and in unsorted ones.
    column = mx.arange(logits.shape[-1])
    last = mx.max(mx.where(likely & (logits == lowest), column, -1), axis=-1, keepdims=True)
    return likely & (column != last)


def best(logits: mx.array, count: int) -> mx.array:
    """Return the ids of the `count` best tokens of each row, best first: [rows, count] int32.

    Equal logits are ordered by id. So the result does not depend on how a partition orders equal
    logits, of which a model in half precision has many.

    logits: [rows, vocabulary] float32, without NaN.
    count: from 1 to the vocabulary size.

    The ids are cut into blocks, and only the `count` blocks with the best maxima are sorted: tokens
    of other blocks are worse than all these maxima, and so worse than `count` tokens.
    """
    vocabulary = logits.shape[-1]
    size = _block_size(vocabulary, count)
    if size < _SMALLEST_BLOCK:
        return _first(logits, mx.arange(vocabulary)[None], count)
    blocks = in_blocks(logits, size, _NEVER)
    heads = mx.max(blocks, axis=-1)
    chosen = _first(heads, mx.arange(heads.shape[-1])[None], count)[:, :, None]
    inside = mx.take_along_axis(blocks, chosen, axis=1)
    return _first(mx.flatten(inside, 1), mx.flatten(chosen * size + mx.arange(size), 1), count)


def in_blocks(values: mx.array, size: int, padding: float) -> mx.array:
    """Return rows as blocks of neighbouring columns, [rows, blocks, size]; the last is padded."""
    rows, length = values.shape
    if over := -length % size:
        values = mx.pad(values, [(0, 0), (0, over)], constant_values=padding)
    return values.reshape(rows, -1, size)


def _block_size(vocabulary: int, count: int) -> int:
    """Return the number of tokens in a block.

    The work is smallest if there are as many blocks as tokens in the chosen blocks. The size is a
    power of two, because most vocabulary sizes are multiples of a power of two.
    """
    return 1 << (isqrt(vocabulary // count).bit_length() - 1)


def _first(logits: mx.array, ids: mx.array, count: int) -> mx.array:
    """Return the ids of the `count` highest logits, in order."""
    # Each integer key combines a logit and its id, and sorts like the pair. The bits of a float
    # sort like its value if all but the sign are inverted in negative numbers. Adding 0 turns -0
    # into 0.
    bits = mx.view(logits + 0.0, mx.int32)
    ascending = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = mx.left_shift((~ascending).astype(mx.int64), _ID_BITS) | ids.astype(mx.int64)
    if count < keys.shape[-1]:
        keys = mx.partition(keys, count - 1, axis=-1)[:, :count]
    return (mx.sort(keys, axis=-1) & _ID).astype(mx.int32)
