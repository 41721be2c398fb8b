"""Places in the buffers of a layer's KV, counted as if rows, heads and columns were one axis.

They let each token be written at its own sequence's length in one operation for all sequences.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np


def placed(part: mx.array, values: mx.array, places: mx.array) -> mx.array:
    """Write values, [n, size], in a buffer whose first three axes count as one. places: [n, 1].

    MLX does this in place, writes whole vectors, and leaves unused rows alone.
    """
    flat = mx.put_along_axis(mx.flatten(part, 0, 2), places, values, 0)
    return mx.unflatten(flat, 0, part.shape[:3])


@lru_cache(maxsize=8)
def first_places(rows: int, heads: int, columns: int, tokens: int) -> mx.array:
    """The places in flat buffers of the first tokens of each row, [rows, heads, tokens] int32."""
    starts = np.arange(rows * heads, dtype=np.int32).reshape(rows, heads, 1) * columns
    return mx.array(starts + np.arange(tokens, dtype=np.int32))


@lru_cache(maxsize=4)
def moves(
    lengths: tuple[int, ...], counts: tuple[int, ...], heads: int, tokens: int, window: int
) -> tuple[mx.array, mx.array]:
    """Where the tokens that stay in the window are in the pass, [n], and where they go, [n, 1].

    lengths, counts: of each sequence, its tokens before the pass and those of the pass that it
    keeps. Both are places in flat arrays, of [rows, heads, tokens] and of [rows, heads, window].
    """
    source, target = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = np.arange(max(count - window, 0), count)
        first = row * heads + np.arange(heads)[:, None]
        source.append((first * tokens + own).ravel())
        target.append((first * window + (length + own) % window).ravel())
    places = np.concatenate(target)[:, None]
    return mx.array(np.concatenate(source).astype(np.int32)), mx.array(places.astype(np.int32))


def forget_arrays() -> None:
    """Drop the cached arrays; called when a model is dropped."""
    first_places.cache_clear()
    moves.cache_clear()
