"""Lets attention compute batches, in families whose code expects another mask or equal positions.

- Gemma 2 (mlx-lm) splits its queries into groups, [rows, heads, group, tokens, size], and adds a
  mask of [rows, 1, tokens, keys] unchanged. The mask's rows then align with heads: the batch fails,
  or is wrong if there are as many rows as heads.
- The Qwen families below (mlx-vlm) cut a mask to the length of the longest row. The buffers are
  wider than that once a longer row has left the batch, and the pass then fails.
- Inkling (mlx-vlm) makes another mask, from distances to the end of the buffers and from the
  cache's `left_padding`, as if all rows ended in the same column.
- MiniMax M3 (mlx-lm) chooses blocks of keys by their distance to the end of the buffers. With this
  patch, it chooses for each row separately, so that a row has the same blocks as alone.
- AFM 7 (mlx-lm) has layers that use another layer's KV, and rotates their queries by the position
  of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from backend.engine.patching import WithOffset, patch

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
    if reusing := getattr(getattr(model, "model", None), "kv_reuse_layers", ()):
        _rotate_by_row(model.model.layers[-1], reusing)


def _rotate_by_row(source: Any, reusing: Sequence[Any]) -> None:
    """Rotate the queries of layers by the positions in the cache of the layer whose KV they use."""
    positions: list[Any] = [0]

    def noting(call: Any, layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        positions[0] = cache.offset
        return call(layer, x, mask, cache)

    def rotated(call: Any, rope: Any, x: mx.array, offset: int) -> Any:  # noqa: ARG001
        return call(rope, x, offset=positions[0])

    patch(source, noting)
    for layer in reusing:
        patch(layer.self_attn.rope, rotated)


def _grouped(call: Any, attention: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
    if isinstance(mask, mx.array) and mask.ndim > 3:
        mask = mask[:, :, None]
    return call(attention, x, mask, cache)


def _uncut(call: Any, attention: Any, x: mx.array, mask: Any, cache: Any, **positions: Any) -> Any:
    # With the width of the buffers as the length of every row, nothing is cut.
    whole = None if cache is None else WithOffset(cache, cache.size())
    return call(attention, x, mask, whole, **positions)


def _from_ends(
    call: Any, attention: Any, x: mx.array, cache: Any = None, conv_mask: Any = None
) -> Any:
    if cache is not None:
        cache = (_EndsInOneColumn(cache[0]), cache[1])
    return call(attention, x, cache, conv_mask)


class _EndsInOneColumn:
    """A layer's cache that returns each row with its unused columns on the left."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.left_padding: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = self._cache.update_and_fetch(keys, values)
        if self._cache.lengths.even:
            return keys, values
        columns = keys.shape[2]
        self.left_padding = columns - self._cache.offset
        sources = (mx.arange(columns) - self.left_padding[:, None]) % columns
        sources = sources[:, None, :, None]
        moved = (mx.take_along_axis(part, sources, axis=2) for part in (keys, values))
        return next(moved), next(moved)


def _by_row(call: Any, attention: Any, x: mx.array, mask: Any, offset: Any, cache: Any) -> Any:
    together = call(attention, x, mask, offset, cache)
    if together is mask or cache is None or cache.lengths.even:
        return together  # no block is dropped, or all rows have the same blocks
    keys, _ = cache.keys_and_values()
    tokens, columns = x.shape[1], keys.shape[2]
    found = []
    for row, end in enumerate(cache.lengths):
        only = slice(row, row + 1)
        known = _Known(keys[only, :, :end])
        chosen = call(attention, x[only], mask[only, ..., :end], end - tokens, known)
        shape = [1, attention.num_attention_heads, tokens]
        rest = mx.zeros([*shape, columns - end], mx.bool_)
        found.append(mx.concatenate([mx.broadcast_to(chosen, [*shape, end]), rest], axis=-1))
    return mx.concatenate(found)


class _Known:
    """A cache of one row that already contains the keys of the current tokens."""

    def __init__(self, keys: mx.array) -> None:
        self._keys = keys

    def update_and_fetch(self, _: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._keys, values
