"""The KV caches of mlx-lm 0.32.2 behind the few verbs that the engine needs.

Everything that depends on how mlx-lm's cache classes behave is here: which of them can be cut
back, which can be batched, and how one row enters and leaves a batch. A `RowCache` holds one
sequence, a `BatchCache` one rectangle of them; both are lists with one cache per layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from backend.engine.plan import CacheCost
from backend.engine.quantized_kv import QuantizedRow
from backend.engine.vision.row_shift import RowShift

RowCache = list[Any]
Snapshot = list[Any]


def new_row(model: Any) -> RowCache:
    """An empty cache for one sequence."""
    cache: RowCache = make_prompt_cache(model)
    return cache


def clone(cache: RowCache) -> RowCache:
    """An independent copy. Buffers are shared until one side writes (MLX copies on write)."""
    return copy.deepcopy(cache)


def can_trim(cache: RowCache) -> bool:
    """Whether the row can be cut back to any shorter prefix right now.

    A chunked cache that has dropped its front says yes, and would answer from what is gone.
    """
    return all(
        layer.is_trimmable() and not getattr(layer, "start_position", 0) for layer in _leaves(cache)
    )


def always_trims(cache: RowCache) -> bool:
    """Whether `can_trim` holds for the row at any length: no window, no recurrent state."""
    return all(map(_keeps, cache))


def trim(cache: RowCache, tokens: int) -> bool:
    """Cut the last `tokens` tokens off. False: a layer could not go back that far.

    What is cut is let go: mlx-lm only moves its offset, and the first write would copy it all.
    """
    if tokens and not all(layer.trim(tokens) == tokens for layer in cache):
        return False
    for layer in _leaves(cache):
        if type(layer) is KVCache and layer.keys is not None:
            layer.keys = layer.keys[..., : layer.offset, :]
            layer.values = layer.values[..., : layer.offset, :]
        elif type(layer) is QuantizedRow:
            layer.release()
    return True


def can_batch(cache: RowCache) -> bool:
    """Whether rows with such caches can be decoded together."""
    return all(hasattr(layer, "merge") for layer in _leaves(cache))


def evaluate(cache: RowCache) -> None:
    """Compute everything the cache holds. Raises what MLX raises."""
    mx.eval([layer.state for layer in cache])


def nbytes(cache: RowCache) -> int:
    return sum(layer.nbytes for layer in cache)


def copies(row: RowCache, count: int) -> RowCache:
    """A batch of so many rows that all hold what `row` holds; one row where none can be batched."""
    if not can_batch(row):
        assert count == 1, "this model's caches hold one sequence at a time"
        return clone(row)
    return [layer.merge([layer] * count) for layer in row]


def snapshot(cache: RowCache) -> Snapshot:
    """Copies of the layers that cannot be cut back; None in the place of the others."""
    return [None if _keeps(layer) else _own(copy.deepcopy(layer)) for layer in cache]


def evaluated(kept: Snapshot) -> int:
    """Compute a snapshot; returns its bytes. Raises what MLX raises."""
    layers = [layer for layer in kept if layer is not None]
    evaluate(layers)
    return nbytes(layers)


def rewind(cache: RowCache, tokens: int, kept: Snapshot | None) -> bool:
    """Cut the last `tokens` tokens off, with a snapshot of the layers that cannot be cut back.

    kept: taken where the cache is to end; None: there is none. False: it cannot be done, and the
    cache is unchanged.
    """
    if not tokens or can_trim(cache):
        return trim(cache, tokens)
    if kept is None:
        return False
    for at, layer in enumerate(cache):
        if kept[at] is not None:
            cache[at] = copy.deepcopy(kept[at])
        else:
            trim([layer], tokens)
    return True


def owned(cache: RowCache) -> RowCache:
    """The cache with no bytes but its own: views of a larger buffer become copies."""
    return [_own(layer) for layer in cache]


class BatchCache:
    """The KV of sequences that decode together; `layers` is what the model is called with."""

    def __init__(self, rows: Sequence[RowCache]) -> None:
        self._count = len(rows)
        if len(rows) == 1:
            self.layers = rows[0]
            self._lone = True
        else:
            self.layers = _merged(rows)
            self._lone = False

    @property
    def nbytes(self) -> int:
        return nbytes(self.layers)

    def join(self, rows: Sequence[RowCache]) -> None:
        if not can_batch(rows[0]):
            raise ValueError("this model's caches hold one sequence at a time")
        self._count += len(rows)
        if self._lone:
            self.layers = _merged([self.layers, *rows])
            self._lone = False
            return
        joining = _merged(rows)
        for layer, other in zip(self.layers, joining, strict=True):
            layer.extend(other)

    def leave(self, places: Sequence[int]) -> None:
        stay = [place for place in range(self._count) if place not in set(places)]
        for layer in self.layers:
            layer.filter(stay)
        self._count = len(stay)

    def extract(self, place: int) -> RowCache:
        if self._lone:
            return clone(self.layers)
        return [layer.extract(place) for layer in self.layers]


def _merged(rows: Sequence[RowCache]) -> list[Any]:
    return [layers[0].merge(layers) for layers in zip(*rows, strict=True)]


class PrefillGroup:
    """Sequences that are prefilled together, each with its own number of new tokens."""

    def __init__(self, rows: Sequence[RowCache], counts: Sequence[int]) -> None:
        self.layers = _merged(rows)
        self._rows = len(rows)
        padding = [max(counts) - count for count in counts]
        self._padded = any(padding)
        if self._padded:
            for layer in self.layers:
                layer.prepare(lengths=list(counts), right_padding=padding)

    def split(self) -> list[RowCache]:
        """The caches of the sequences, after the model ran."""
        if self._padded:
            for layer in self.layers:
                layer.finalize()
        return [[layer.extract(row) for layer in self.layers] for row in range(self._rows)]


def vocabulary_size(model: Any) -> int:
    """How many tokens the model knows. MLX does not check ids: a larger one reads foreign memory.

    Nothing is computed: the shape of the logits is enough.
    """
    return int(model(mx.array([[0]]), cache=new_row(model)).shape[-1])


def cost(model: Any) -> CacheCost:
    """Measure what a row costs by running one token through the model."""
    cache = new_row(model)
    mx.eval(model(mx.array([[0]]), cache=cache), [layer.state for layer in cache])
    per_token = fixed = 0
    windowed: list[tuple[int, int]] = []
    for layer in _leaves(cache):
        length = _room(layer)
        if isinstance(layer, RotatingKVCache) and length:
            windowed.append((layer.nbytes // length, layer.max_size))
        elif length:
            per_token += layer.nbytes // length
        else:
            fixed += layer.nbytes
    return CacheCost(per_token, fixed, tuple(windowed))


def _keeps(layer: Any) -> bool:
    """Whether a layer keeps every token, so that it can be cut back to any length."""
    return all(type(leaf) in (KVCache, QuantizedRow, RowShift) for leaf in _leaves([layer]))


def _own(layer: Any) -> Any:
    for leaf in _leaves([layer]):
        if type(leaf) is ArraysCache:
            leaf.cache = [None if part is None else mx.contiguous(part) for part in leaf.cache]
    return layer


def _room(layer: Any) -> int:
    """Tokens that the layer has memory for; 0 where its memory does not grow with them."""
    keys = getattr(layer, "keys", None)
    if keys is None:
        return 0
    packed = keys[0] if isinstance(layer, QuantizedRow) else keys
    return int(packed.shape[2])


def _leaves(cache: Sequence[Any]) -> Iterator[Any]:
    for layer in cache:
        inner = getattr(layer, "caches", None)
        if inner is None:
            yield layer
        else:
            yield from _leaves(inner)
