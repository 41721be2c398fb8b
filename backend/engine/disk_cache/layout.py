"""Describes the structure of a model's KV, and converts between rows and buffers without MLX.

A correct checksum shows that a file is undamaged, but not that its contents are valid. Its layers
are therefore compared with the layers of the loaded model before anything reaches MLX. Functions
that use MLX arrays run on the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from backend.engine.caching import kv
from backend.engine.caching.layer_kv import LayerKV
from backend.engine.caching.row_shift import RowShift

# Classes of caches, of this project and of mlx-lm.
_WHOLE = frozenset({"LayerKV", "QuantizedKV"})  # these store every token
_WINDOWS = frozenset({"WindowKV", "QuantizedWindowKV"})
_GROWING = _WHOLE | _WINDOWS | {"ChunkedKVCache"}  # axis 2 of their arrays is the token
KINDS = _GROWING | {"ArraysCache"}
# NumPy has no bfloat16, so arrays are viewed as unsigned integers.
_CARRIERS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}

Arrays = Sequence[NDArray[Any]]


class ArraySpec(NamedTuple):
    """The type and shape of an array in a cache's state."""

    dtype: str
    shape: tuple[int, ...]


class Layer(NamedTuple):
    """The class name of a cache that is not a CacheList, and the leaves of its state by path."""

    kind: str
    parts: dict[str, Any]  # ArraySpec, int or None


Layers = Sequence[Layer]


def carrier(dtype: str) -> mx.Dtype:
    """Return the unsigned integer type as which arrays of a type are stored."""
    return _CARRIERS[getattr(mx, dtype).size]


def learn_layout(model: Any) -> Layers | None:
    """Return the layers of a model's rows after one token; None if they cannot be stored.

    Nothing is computed, because the shapes are enough.
    """
    row = kv.new_row(model)
    model(mx.array([[0]]), cache=row)
    layers = [_layer(cache) for cache in _stored(row)]
    return layers if all(map(_storable, layers)) else None


def pack(row: kv.RowCache, *, copy: bool) -> tuple[Layers, list[mx.array]]:
    """Return a row's layers, and evaluated views of the used parts of its buffers.

    copy: whether to copy the buffers first. On an NVIDIA GPU, a read by the host moves a buffer to
        other memory while kernels may be using it. With unified memory, views are safe and free.
    """
    leaves = [leaf for cache in _stored(row) for leaf in _leaves(cache).values()]
    arrays = [leaf for leaf in leaves if isinstance(leaf, mx.array)]
    carried = [array.view(_CARRIERS[array.dtype.size]) for array in arrays]
    if copy:
        carried = [array | mx.array(0, array.dtype) for array in carried]
    mx.eval(carried)
    return [_layer(cache) for cache in _stored(row)], carried


def unpack(layers: Layers, arrays: Arrays, row: kv.RowCache) -> None:
    """Fill a new row with arrays from a file, whose layers `fits` has accepted."""
    left = iter(arrays)
    for layer, cache in zip(layers, _stored(row), strict=True):
        parts = {
            path: mx.array(next(left)).view(getattr(mx, part.dtype))
            if isinstance(part, ArraySpec)
            else part
            for path, part in layer.parts.items()
        }
        cache.state = tree_unflatten(list(parts.items()))
    kv.evaluate(row)


def fits(model: Layers, stored: Layers, tokens: int) -> bool:
    """Return whether stored layers can be the KV of `tokens` tokens.

    model: the layers of the model's rows, as from `learn_layout`.
    """
    return len(model) == len(stored) and all(
        _fits(*pair, tokens) for pair in zip(model, stored, strict=True)
    )


def _fits(one_token: Layer, layer: Layer, tokens: int) -> bool:
    """Return whether a layer can be the KV of `tokens` tokens.

    one_token: the model's layer after one token, which has the same form.
    """
    kind, growing = one_token.kind, one_token.kind in _GROWING
    if layer.kind != kind or _forms(one_token, growing=growing) != _forms(layer, growing=growing):
        return False
    arrays = [part for part in layer.parts.values() if isinstance(part, ArraySpec)]
    if not growing or not arrays:  # a recurrent state does not show its number of tokens
        return not growing or layer.parts == one_token.parts
    length, *uneven = {array.shape[2] for array in arrays}
    offset, *numbers = _numbers(layer)
    _, *expected = _numbers(one_token)
    if uneven or offset != tokens:
        return False
    if kind in _WHOLE:  # numbers: group size and bits of quantised KV
        return numbers == expected and length == tokens
    if kind in _WINDOWS:  # numbers: size of the window, then as above
        return numbers == expected and length == min(tokens, numbers[0])
    if numbers[:-1] != expected[:-1]:
        return False
    return (
        0 <= numbers[1] <= tokens <= numbers[1] + length
    )  # numbers: size of a chunk, dropped tokens


def _forms(layer: Layer, *, growing: bool) -> dict[str, Any]:
    """Return what parts have in common with the parts of a row of any other length."""
    return {
        path: (part.dtype, len(part.shape), part.shape[:2] + part.shape[2 + growing :])
        if isinstance(part, ArraySpec)
        else type(part)
        for path, part in layer.parts.items()
    }


def _numbers(layer: Layer) -> list[int]:
    return [part for part in layer.parts.values() if type(part) is int]


def _layer(cache: Any) -> Layer:
    parts = {
        path: ArraySpec(str(leaf.dtype).removeprefix("mlx.core."), leaf.shape)
        if isinstance(leaf, mx.array)
        else leaf
        for path, leaf in _leaves(cache).items()
    }
    return Layer(type(cache).__name__, parts)


def _leaves(cache: Any) -> dict[str, Any]:
    """Return the leaves of a cache's state, without the unused ends of its buffers."""
    leaves: dict[str, Any] = dict(tree_flatten(cache.state))
    if isinstance(cache, LayerKV):
        for path, leaf in leaves.items():
            if isinstance(leaf, mx.array):
                leaves[path] = leaf[..., : cache.size(), :]
    return leaves


def _storable(layer: Layer) -> bool:
    return layer.kind in KINDS and all(
        part is None or type(part) is int or (type(part) is ArraySpec and hasattr(mx, part.dtype))
        for part in layer.parts.values()
    )


def _stored(row: kv.RowCache) -> Iterator[Any]:
    """Yield the caches of a row that are stored.

    A RowShift is not stored, because its shift is 0 for prompts without media.
    """
    return (cache for cache in kv.leaves(row) if not isinstance(cache, RowShift))
