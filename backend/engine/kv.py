"""The KV caches of mlx-lm 0.32.2 behind the few verbs that the engine needs.

Everything that depends on how mlx-lm's cache classes behave is here: which of them can be cut
back, which can be batched, and how one row enters and leaves a batch. A `RowCache` holds one
sequence, a `BatchCache` one rectangle of them; both are lists with one cache per layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from backend.engine.quantized_kv import QuantizedRow
from backend.engine.vision.row_shift import RowShift

_STEP: int = KVCache.step  # tokens by which a cache grows

RowCache = list[Any]
BatchCache = list[Any]


@dataclass(frozen=True, slots=True)
class CacheCost:
    """What one row costs: bytes that grow with its tokens (up to `window`), and bytes that do not.

    windowed: (bytes per token, most tokens) of layers with a sliding window.
    """

    per_token: int
    fixed: int
    windowed: tuple[tuple[int, int], ...] = ()

    def of(self, tokens: int) -> int:
        """Bytes of a row of so many tokens, with the caches' own growth step included."""
        steps = -(-tokens // _STEP) * _STEP
        bounded: int = sum(size * min(steps, most) for size, most in self.windowed)
        return self.fixed + steps * self.per_token + bounded


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
    return all(type(layer) in (KVCache, QuantizedRow, RowShift) for layer in _leaves(cache))


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


def evaluate(cache: RowCache | BatchCache) -> None:
    """Compute everything the cache holds. Raises what MLX raises."""
    mx.eval([layer.state for layer in cache])


def nbytes(cache: RowCache | BatchCache) -> int:
    return sum(layer.nbytes for layer in cache)


def to_batch(row: RowCache) -> BatchCache:
    """A batch of one row, sharing nothing with `row`."""
    return [layer.merge([layer]) for layer in row]


def copies(row: RowCache, count: int) -> BatchCache:
    """A batch of so many rows that all hold what `row` holds; one row where none can be batched."""
    if not can_batch(row):
        assert count == 1, "this model's caches hold one sequence at a time"
        return clone(row)
    return [layer.merge([layer] * count) for layer in row]


def extend(batch: BatchCache, other: BatchCache) -> None:
    """Append the rows of `other` to `batch`."""
    for layer, joining in zip(batch, other, strict=True):
        layer.extend(joining)


def keep(batch: BatchCache, rows: Sequence[int]) -> None:
    """Drop every row that is not named."""
    for layer in batch:
        layer.filter(list(rows))


def extract(batch: BatchCache, row: int) -> RowCache:
    """A copy of one row of the batch."""
    return [layer.extract(row) for layer in batch]


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
