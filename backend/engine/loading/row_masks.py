"""Lets attention take the mask of a batch, in families whose code expects another one.

- Gemma 2 (mlx-lm) splits its queries into groups, [rows, heads, group, tokens, size], and
  adds a mask of [rows, 1, tokens, keys] to them unchanged. The mask's rows then align with heads:
  the batch fails, or is wrong if there are as many rows as heads.
- The Qwen families below (mlx-vlm) cut a mask to the length of the longest row. The batch is
  wider than that once a longer row has left it, and then fails.
- Inkling (mlx-vlm) makes a mask of its own, of distances to the end of the buffers and of
  the cache's `left_padding`, as if all rows ended in the same column.
- MiniMax M3 (mlx-lm) chooses blocks of keys by their distance to the end of the buffers.
  Here it chooses for each row by itself, so that a row has the blocks that it has alone.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.patching import patch

_OF_GROUPS = "mlx_lm.models.gemma2"
_CUT = ("mlx_vlm.models.qwen3_vl_moe.language", "mlx_vlm.models.qwen3_omni_moe.language")
_FROM_ENDS = "mlx_vlm.models.inkling.language"
_OF_BLOCKS = "mlx_lm.models.minimax_m3_vl"


def fit_row_masks(model: Any) -> None:
    """Let the attention of a model accept the masks of batches."""
    for layer in getattr(model, "layers", ()):
        attention = getattr(layer, "self_attn", None)
        module = type(attention).__module__
        if module == _OF_GROUPS and getattr(attention, "repeats", 1) > 1:
            patch(attention, _grouped)
        elif module in _CUT:
            patch(attention, _uncut)
        elif module == _FROM_ENDS:
            patch(attention, _from_ends)
        elif module == _OF_BLOCKS:
            patch(attention, _by_row, "_block_mask")


def _grouped(own: Any, attention: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
    if isinstance(mask, mx.array) and mask.ndim > 3:
        mask = mask[:, :, None]
    return own(attention, x, mask, cache)


def _uncut(own: Any, attention: Any, x: mx.array, mask: Any, cache: Any, **positions: Any) -> Any:
    whole = None if cache is None else _AsLongAsWide(cache)
    return own(attention, x, mask, whole, **positions)


class _AsLongAsWide:
    """The cache of a layer, whose rows all seem as long as its buffers are wide."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.offset = cache.size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _from_ends(
    own: Any, attention: Any, x: mx.array, cache: Any = None, conv_mask: Any = None
) -> Any:
    if cache is not None:
        cache = (_EndsInOneColumn(cache[0]), cache[1])
    return own(attention, x, cache, conv_mask)


class _EndsInOneColumn:
    """The cache of a layer, whose rows seem to have their empty columns on the left."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.left_padding: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = self._cache.update_and_fetch(keys, values)
        if self._cache.lengths.even:
            return keys, values
        columns = keys.shape[2]
        self.left_padding = columns - self._cache.offset
        places = (mx.arange(columns) - self.left_padding[:, None]) % columns
        places = places[:, None, :, None]
        moved = (mx.take_along_axis(part, places, axis=2) for part in (keys, values))
        return next(moved), next(moved)


def _by_row(own: Any, attention: Any, x: mx.array, mask: Any, offset: Any, cache: Any) -> Any:
    together = own(attention, x, mask, offset, cache)
    if together is mask or cache is None or cache.lengths.even:
        return together  # None of its blocks is dropped, or all rows have the same.
    keys, _ = cache.keys_and_values()
    tokens, columns = x.shape[1], keys.shape[2]
    found = []
    for row, end in enumerate(cache.lengths):
        only = slice(row, row + 1)
        known = _Known(keys[only, :, :end])
        chosen = own(attention, x[only], mask[only, ..., :end], end - tokens, known)
        shape = [1, attention.num_attention_heads, tokens]
        rest = mx.zeros([*shape, columns - end], mx.bool_)
        found.append(mx.concatenate([mx.broadcast_to(chosen, [*shape, end]), rest], axis=-1))
    return mx.concatenate(found)


class _Known:
    """The cache of one row, whose latest keys have been written."""

    def __init__(self, keys: mx.array) -> None:
        self._keys = keys

    def update_and_fetch(self, _: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._keys, values
