"""Batch masks for Gemma 2, whose attention in mlx-lm 0.32.2 expects the mask of a single row.

The attention splits its queries into groups, [rows, heads, group, tokens, size], and adds a mask of
[rows, 1, tokens, keys] to them unchanged. The mask's rows then align with heads: the batch fails,
or is wrong if there are as many rows as heads.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

_FAMILY = "mlx_lm.models.gemma2"


def fit_row_masks(model: Any) -> None:
    """Let the attention of a Gemma 2 accept masks that differ by row."""
    for layer in getattr(model, "layers", ()):
        attention = getattr(layer, "self_attn", None)
        kind: Any = type(attention)
        if kind.__module__ == _FAMILY and getattr(attention, "repeats", 1) > 1:
            attention.__class__ = type(kind.__name__, (kind,), {"__call__": _fitted(kind)})


def _fitted(kind: Any) -> Any:
    def call(attention: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if isinstance(mask, mx.array) and mask.ndim > 3:
            mask = mask[:, :, None]
        return kind.__call__(attention, x, mask, cache)

    return call
