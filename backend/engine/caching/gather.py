"""Combines the caches of several sequences into one cache per layer, and splits them again.

Sequences that stay and sequences that join are both members of the new cache. All are copied once,
or, if a layer's buffers are large enough, only those that are not in them yet (`rearranged`). All
cache classes that mlx-lm can batch are supported; a cache of any other class holds one sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from backend.engine.caching.layer_kv import LayerKV, Member, RowShift, WindowKV


def of_rows(layer: Any) -> Any:
    """Return an empty cache for several sequences that replaces mlx-lm's cache of this layer.

    Returns the layer itself if there is none.
    """
    if isinstance(layer, CacheList):
        layer.caches = tuple(map(of_rows, layer.caches))
    elif type(layer) is KVCache:
        layer = LayerKV()
    elif type(layer) is RotatingKVCache and not layer.keep:
        layer = WindowKV(layer.max_size)
    return layer


def can_gather(layer: Any) -> bool:
    """Return whether caches like this one can be combined."""
    if isinstance(layer, CacheList):
        return all(map(can_gather, layer.caches))
    return isinstance(layer, LayerKV | RowShift) or keeps_state(layer)


def rearranged(layer: Any, members: Sequence[Member], rows: int) -> Any:
    """Return a cache with the sequences, in this order, in the buffers of `layer` if they fit.

    Recurrent states are always copied.
    members: sequences of `layer` and of others, as in `LayerKV.rearranged`.
    rows: the number of rows that buffers may have, including unused rows.
    """
    if isinstance(layer, CacheList):
        return _each(layer, members, lambda own, inner: rearranged(own, inner, rows))
    kept = None if keeps_state(layer) else layer.rearranged(members, rows)
    return gathered(members, rows) if kept is None else kept


def gathered(members: Sequence[Member], rows: int = 0) -> Any:
    """Return a new cache with copies of the sequences, in this order."""
    layer, _ = members[0]
    if isinstance(layer, CacheList):
        return _each(layer, members, lambda _, inner: gathered(inner, rows))
    return _gathered_states(members) if keeps_state(layer) else layer.gathered(members, rows)


def extracted(member: Member) -> Any:
    """Return a new cache with a copy of a single sequence."""
    layer, row = member
    if isinstance(layer, CacheList):
        return _each(layer, [member], lambda own, _: extracted((own, row)))
    if keeps_state(layer):
        alone: Any = type(layer)(len(layer.cache))
        rows = slice(row, row + 1)
        alone.cache = [
            None if state is None else mx.contiguous(state[rows]) for state in layer.cache
        ]
        return alone
    return layer.extracted(row) if can_gather(layer) else _compact(layer)


def keeps_state(layer: Any) -> bool:
    """Return whether a layer's cache is an ArraysCache: recurrent states of a fixed size."""
    return isinstance(getattr(layer, "cache", None), list) and hasattr(layer, "advance")


def _each(
    layer: CacheList, members: Sequence[Member], made: Callable[[Any, list[Member]], Any]
) -> Any:
    """Return a list of caches like `layer`.

    made: called for each cache of the list, with that cache and the members' caches at its index.
    """
    kind: Any = type(layer)
    inner = zip(*(cache.caches for cache, _ in members), strict=True)
    rows = [row for _, row in members]
    pairs = zip(layer.caches, inner, strict=True)
    return kind(*(made(own, list(zip(caches, rows, strict=True))) for own, caches in pairs))


def _gathered_states(members: Sequence[Member]) -> Any:
    """Combine recurrent states. A missing state becomes zero, with which models begin too."""
    layer, _ = members[0]
    batch = type(layer)(len(layer.cache))
    for at in range(len(layer.cache)):
        states = [(cache.cache[at], row) for cache, row in members]
        like = next((state for state, _ in states if state is not None), None)
        if like is not None:
            nothing = mx.zeros((1, *like.shape[1:]), like.dtype)
            batch.cache[at] = mx.concatenate(
                [nothing if state is None else state[row : row + 1] for state, row in states]
            )
    return batch


def _compact(layer: Any) -> Any:
    """Return a copy whose buffers are no larger than their contents."""

    def owned(value: Any) -> Any:
        return mx.contiguous(value) if isinstance(value, mx.array) else copy.copy(value)

    layer = copy.copy(layer)
    for name, value in vars(layer).items():
        setattr(layer, name, tree_map(owned, value))
    return layer
