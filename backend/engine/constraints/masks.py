"""Applies masks of allowed tokens to logits."""

from __future__ import annotations

import mlx.core as mx

_BITS = 32


def apply(logits: mx.array, allowed: mx.array) -> mx.array:
    """Return the logits, with -inf for tokens that are not allowed.

    logits: [rows, vocabulary], any float type.
    allowed: [rows, words] uint32, one bit per token id, the lowest bit of a word first.
    """
    rows, vocabulary = logits.shape
    bits = (allowed[:, :, None] >> mx.arange(_BITS, dtype=mx.uint32)) & 1
    keep = bits.astype(mx.bool_).reshape(rows, -1)[:, :vocabulary]
    return mx.where(keep, logits, mx.array(-mx.inf, dtype=logits.dtype))
