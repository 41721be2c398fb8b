"""Lets attention take the mask of a batch, in families whose code expects another one.

- Gemma 2 (mlx-lm 0.32.2) splits its queries into groups, [rows, heads, group, tokens, size], and
  adds a mask of [rows, 1, tokens, keys] to them unchanged. The mask's rows then align with heads:
  the batch fails, or is wrong if there are as many rows as heads.
- The Qwen families below (mlx-vlm 0.7.10) cut a mask to the length of the longest row. The batch is
  wider than that once a longer row has left it, and then fails.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.patching import patch

_OF_GROUPS = "mlx_lm.models.gemma2"
_CUT = ("mlx_vlm.models.qwen3_vl_moe.language", "mlx_vlm.models.qwen3_omni_moe.language")


def fit_row_masks(model: Any) -> None:
    """Let the attention of a model accept the masks of batches."""
    for layer in getattr(model, "layers", ()):
        attention = getattr(layer, "self_attn", None)
        kind: Any = type(attention)
        if kind.__module__ == _OF_GROUPS and getattr(attention, "repeats", 1) > 1:
            patch(attention, __call__=_grouped(kind))
        elif kind.__module__ in _CUT:
            patch(attention, __call__=_uncut(kind))


def _grouped(kind: Any) -> Any:
    def call(attention: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if isinstance(mask, mx.array) and mask.ndim > 3:
            mask = mask[:, :, None]
        return kind.__call__(attention, x, mask, cache)

    return call


def _uncut(kind: Any) -> Any:
    def call(attention: Any, x: mx.array, mask: Any, cache: Any, **positions: Any) -> Any:
        whole = None if cache is None else _AsLongAsWide(cache)
        return kind.__call__(attention, x, mask, whole, **positions)

    return call


class _AsLongAsWide:
    """The cache of a layer, whose rows all seem as long as its buffers are wide."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.offset = cache.size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
