"""Combines the caches of several sequences into one batch cache per layer, and splits them again.

Sequences that stay and sequences that join are both members of the new batch. All are copied once,
or, where a layer's buffers have room for them, only those that need it (`rearranged`). All cache
classes that mlx-lm can batch are supported; a cache of any other class holds one sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from backend.engine.caching.quantized_kv import QuantizedBatch, QuantizedRow
from backend.engine.caching.rectangle import Rectangle, RowKV, Span
from backend.engine.caching.row_shift import BatchShift, RowShift
from backend.engine.caching.window import BatchWindow, row_span

PLAIN = (KVCache, RowKV)  # caches of one sequence that keep every token as it is

# A layer's cache, and the row of a sequence in it; 0 in a cache of one sequence.
Member = tuple[Any, int]


class BatchKV(Rectangle):
    """Keys and values of several sequences; the batched counterpart of mlx-lm's KVCache."""


def can_gather(layer: Any) -> bool:
    """Whether single-sequence caches like this one can be combined."""
    match layer:
        case CacheList():
            return all(map(can_gather, layer.caches))
        case RotatingKVCache():  # `BatchWindow` cannot keep the first tokens
            return not layer.keep
        case Rectangle() | QuantizedRow() | RowShift() | BatchShift():
            return True
        case _:
            return type(layer) in PLAIN or keeps_state(layer)


def rearranged(layer: Any, members: Sequence[Member], rows: int) -> Any:
    """A batch cache with the sequences, in this order, in the buffers of `layer` if they fit.

    members: sequences of `layer` and of others, as `Rectangle.rearranged` takes them. rows: the
    number of rows, spare ones included, that buffers may have. Windows and recurrent states, whose
    size does not grow with a sequence's length, are copied.
    """
    if isinstance(layer, CacheList):
        kind: Any = type(layer)
        inner = zip(*(one.caches for one, _ in members), strict=True)
        own = [row for _, row in members]
        return kind(
            *(
                rearranged(one, list(zip(caches, own, strict=True)), rows)
                for one, caches in zip(layer.caches, inner, strict=True)
            )
        )
    if isinstance(layer, (BatchKV, QuantizedBatch)):
        kept = layer.rearranged(_spans(members), rows)
        if kept is not None:
            return kept
    return gathered(members, rows)


def gathered(members: Sequence[Member], rows: int = 0) -> Any:
    """A new batch cache with copies of the sequences, in this order.

    rows: as in `rearranged`.
    """
    layer, _ = members[0]
    match layer:
        case CacheList():
            inner = zip(*(one.caches for one, _ in members), strict=True)
            own = [row for _, row in members]
            kind: Any = type(layer)
            return kind(*(gathered(list(zip(caches, own, strict=True)), rows) for caches in inner))
        case RowShift() | BatchShift():
            return BatchShift(_shift(*member).shift for member in members)
        case RotatingKVCache() | BatchWindow():
            return BatchWindow.of(_spans(members), max_size=layer.max_size)
        case QuantizedRow() | QuantizedBatch():
            sizes = {"group_size": layer.group_size, "bits": layer.bits}
            return QuantizedBatch.of(_spans(members), rows, **sizes)
        case KVCache() | BatchKV():
            return BatchKV.of(_spans(members), rows)
        case _:
            return _gathered_states(members)


def taken(member: Member) -> Any:
    """A new single-sequence cache with buffers of its own."""
    layer, row = member
    alone: Any
    match layer:
        case CacheList():
            alone = type(layer)
            return alone(*(taken((one, row)) for one in layer.caches))
        case RowShift() | BatchShift():
            return RowShift(_shift(layer, row).shift)
        case RotatingKVCache() | BatchWindow():
            alone = RotatingKVCache(layer.max_size)
        case QuantizedRow() | QuantizedBatch():
            alone = QuantizedRow(layer.group_size, layer.bits)
        case _ if type(layer) in (*PLAIN, BatchKV):
            alone = RowKV()
        case _ if keeps_state(layer):
            alone = type(layer)(len(layer.cache))
            rows = slice(row, row + 1)
            alone.cache = [None if one is None else mx.contiguous(one[rows]) for one in layer.cache]
            return alone
        case _:
            return _compact(layer)
    span = _span(layer, row)
    parts = span.copy()
    if parts and span.places:
        half = len(parts) // 2
        quantised = isinstance(alone, QuantizedRow)
        alone.keys, alone.values = (parts[:half], parts[half:]) if quantised else parts
        alone.offset = span.length
        if isinstance(alone, RotatingKVCache):
            alone._idx = span.places
    return alone


def keeps_state(layer: Any) -> bool:
    """Whether it is an ArraysCache of mlx-lm or mlx-vlm: recurrent states of a fixed size."""
    return isinstance(getattr(layer, "cache", None), list) and hasattr(layer, "advance")


def _gathered_states(members: Sequence[Member]) -> Any:
    """Combine recurrent states. A missing state becomes zero, with which models begin too."""
    layer, _ = members[0]
    batch = type(layer)(len(layer.cache))
    for at in range(len(layer.cache)):
        states = [(one.cache[at], row) for one, row in members]
        like = next((state for state, _ in states if state is not None), None)
        if like is not None:
            nothing = mx.zeros((1, *like.shape[1:]), like.dtype)
            batch.cache[at] = mx.concatenate(
                [nothing if state is None else state[row : row + 1] for state, row in states]
            )
    return batch


def _spans(members: Sequence[Member]) -> list[Span]:
    return [_span(layer, row) for layer, row in members]


def _span(layer: Any, row: int) -> Span:
    match layer:
        case Rectangle():
            return layer.span(row)
        case RotatingKVCache():
            return row_span(layer)
        case QuantizedRow():
            parts = (*(layer.keys or ()), *(layer.values or ()))
            return Span(parts, 0, ((0, layer.offset),), layer.offset)
        case _:
            parts = () if layer.keys is None else (layer.keys, layer.values)
            return Span(parts, 0, ((0, layer.offset),), layer.offset)


def _shift(layer: RowShift | BatchShift, row: int) -> RowShift:
    return layer if isinstance(layer, RowShift) else layer.row(row)


def _compact(layer: Any) -> Any:
    """A copy whose buffers are no larger than their contents."""

    def owned(value: Any) -> Any:
        return mx.contiguous(value) if isinstance(value, mx.array) else copy.copy(value)

    layer = copy.copy(layer)
    for name, value in vars(layer).items():
        setattr(layer, name, tree_map(owned, value))
    return layer
