"""Attention over quantised keys and values with different numbers of bits.

mlx-lm and mlx-vlm have a function for one number of bits, which their attention looks up in its
module at each call. The function here replaces theirs. It also accepts a pair of numbers, for keys
and for values, and a part that is not quantised.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from backend.engine.device import reads_views

_MODULES = ("mlx_lm.models.base", "mlx_vlm.models.base")
_NAME = "quantized_scaled_dot_product_attention"


def install() -> None:
    """Replace the function in those of the two libraries that are loaded."""
    for name in _MODULES:
        module: Any = sys.modules.get(name)
        if module is not None:
            getattr(module, _NAME)  # fails if a release has renamed it
            setattr(module, _NAME, attend)


def attend(
    queries: mx.array,
    q_keys: Any,
    q_values: Any,
    scale: float,
    mask: mx.array | str | None,
    group_size: int = 64,
    bits: int | Sequence[int] = 8,
) -> mx.array:
    """Return the attention of queries, [rows, heads, tokens, size], with the libraries' arguments.

    q_keys, q_values: packed values, scales and biases, or an array that is not quantised.
    bits: bits per number: one for both, or `Bits`; 0 means not quantised.
    """
    key_bits, value_bits, *known = (bits, bits) if isinstance(bits, int) else bits
    rows, heads, tokens, size = queries.shape
    kv_heads = (q_keys[0] if key_bits else q_keys).shape[1]
    # Heads that share keys and values are an axis of their own.
    grouped = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, tokens, size)
    scores = _product(grouped, q_keys, group_size, key_bits, transpose=True)
    columns = scores.shape[-1]
    seen = known[0] if known and known[0] else columns
    if isinstance(mask, str):
        mask = mx.arange(seen - tokens, seen)[:, None] >= mx.arange(columns)
    elif seen < columns:
        mask = mx.arange(columns) < seen if mask is None else _widened(mask, columns)
    if mask is not None:
        if mask.ndim > 3:
            by_head = mask.shape[1] > 1
            mask = mask.reshape(
                mask.shape[0], *(grouped.shape[1:3] if by_head else (1, 1)), *mask.shape[2:]
            )
        if mask.dtype == mx.bool_:
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        else:
            scores += mask
    weights = mx.softmax(scores, axis=-1, precise=True)
    found = _product(weights, q_values, group_size, value_bits, transpose=False)
    return found.reshape(rows, heads, tokens, found.shape[-1])


def _widened(mask: mx.array, columns: int) -> mx.array:
    """Return the mask with further columns, which it hides."""
    hidden = False if mask.dtype == mx.bool_ else mx.finfo(mask.dtype).min
    more = [(0, 0)] * (mask.ndim - 1) + [(0, columns - mask.shape[-1])]
    return mx.pad(mask, more, constant_values=mx.array(hidden, mask.dtype))


def _product(
    left: mx.array, right: Any, group_size: int, bits: int, *, transpose: bool
) -> mx.array:
    """Return products, [rows, heads of keys, heads that share them, tokens, n].

    The heads that share keys are rows of the same product: MLX copies keys that are broadcast on a
    CPU, and multiplies several tokens by them wrongly on Metal
    (https://github.com/ml-explore/mlx/issues/3480). A single token is multiplied rightly, and for
    long values faster, because Metal divides products of vectors among more threads.
    """
    *batch, shared, tokens, _ = left.shape
    if bits and tokens == 1 and reads_views():
        packed, scales, biases = (mx.expand_dims(part, 2) for part in right)
        flat = left
    else:
        flat = mx.flatten(left, 2, 3)
        if not bits:
            plain: mx.array = flat @ (right.swapaxes(-1, -2) if transpose else right)
            return plain.reshape(*batch, shared, tokens, plain.shape[-1])
        packed, scales, biases = right
    found = mx.quantized_matmul(
        flat, packed, scales, biases, transpose=transpose, group_size=group_size, bits=bits
    )
    return found.reshape(*batch, shared, tokens, found.shape[-1])
