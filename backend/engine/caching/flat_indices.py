"""Flat indices into the buffers of a layer's KV: rows, heads and columns count as one axis.

With these indices, one operation writes the tokens of all sequences, each after the last token of
the sequence.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np


def with_values(part: mx.array, values: mx.array, indices: mx.array) -> mx.array:
    """Return the buffer with values written at flat indices; MLX changes the buffer itself.

    Only whole vectors are written, and unused rows are left alone.
    part: the buffer, [rows, heads, columns, size].
    values: [n, size].
    indices: the flat indices, [n, 1].
    """
    flat = mx.put_along_axis(mx.flatten(part, 0, 2), indices, values, 0)
    return mx.unflatten(flat, 0, part.shape[:3])


@lru_cache(maxsize=8)
def first_indices(rows: int, heads: int, columns: int, tokens: int) -> mx.array:
    """Return the flat indices of the first tokens of each row, [rows, heads, tokens] int32."""
    starts = np.arange(rows * heads, dtype=np.int32).reshape(rows, heads, 1) * columns
    return mx.array(starts + np.arange(tokens, dtype=np.int32))


@lru_cache(maxsize=4)
def moves(
    lengths: tuple[int, ...], counts: tuple[int, ...], heads: int, tokens: int, window: int
) -> tuple[mx.array, mx.array]:
    """Return where to find the tokens of a pass that stay in the window, and where to write them.

    lengths: tokens of each sequence before the pass.
    counts: number of tokens of the pass that remain in each sequence.
    Both results are flat indices: [n] into the tokens of the pass, [rows, heads, tokens], and
    [n, 1] into the window's buffers, [rows, heads, window].
    """
    source, target = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        staying = np.arange(max(count - window, 0), count)
        first = row * heads + np.arange(heads)[:, None]
        source.append((first * tokens + staying).ravel())
        target.append((first * window + (length + staying) % window).ravel())
    indices = np.concatenate(target)[:, None]
    return mx.array(np.concatenate(source).astype(np.int32)), mx.array(indices.astype(np.int32))


def forget_arrays() -> None:
    """Drop the cached arrays; called when a model is dropped."""
    first_indices.cache_clear()
    moves.cache_clear()
