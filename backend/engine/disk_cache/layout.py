"""Describes the structure of a model's KV, and converts between rows and buffers without MLX.

A correct checksum shows that a file is undamaged, but not that its contents are valid. Its arrays
and numbers are therefore compared with the layers of the loaded model before anything reaches MLX.
Functions that use MLX arrays run on the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from backend.engine.caching import kv
from backend.engine.caching.layer_kv import LayerKV, RowShift

# Classes of caches, of this project and of mlx-lm.
_WHOLE = frozenset({"LayerKV", "QuantizedKV"})  # these store every token
_WINDOWS = frozenset({"WindowKV", "QuantizedWindowKV"})
_GROWING = _WHOLE | _WINDOWS | {"ChunkedKVCache"}  # axis 2 of their arrays is the token
KINDS = _GROWING | {"ArraysCache"}
# NumPy has no bfloat16, so arrays are viewed as unsigned integers.
_CARRIERS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}

Arrays = Sequence[NDArray[Any] | mx.array]


class ArraySpec(NamedTuple):
    """The type and shape of an array in a cache's state."""

    dtype: str
    shape: tuple[int, ...]


class Layer(NamedTuple):
    """The class of a cache, and the leaves of its state by path: ArraySpec, int or None."""

    kind: str
    leaves: dict[str, Any]

    @property
    def arrays(self) -> list[ArraySpec]:
        return [leaf for leaf in self.leaves.values() if isinstance(leaf, ArraySpec)]

    @property
    def numbers(self) -> list[int]:
        return [leaf for leaf in self.leaves.values() if type(leaf) is int]


Layers = Sequence[Layer]


def learn_layout(model: Any) -> Layers | None:
    """Return the layers of a model's rows after one token; None if they cannot be stored.

    Nothing is computed, because the shapes are enough.
    """
    row = kv.new_row(model)
    model(mx.array([[0]]), cache=row)
    layers = [_layer(cache) for cache in _stored(row)]
    return layers if all(map(_storable, layers)) else None


def pack(row: kv.RowCache, *, copy: bool) -> tuple[list[mx.array], list[int]]:
    """Return evaluated views of the used parts of a row's buffers, and the numbers of its caches.

    copy: whether to copy the buffers first. On an NVIDIA GPU, a read by the host moves a buffer to
        other memory while kernels may be using it. With unified memory, views are safe and free.
    """
    leaves = [leaf for cache in _stored(row) for leaf in _leaves(cache).values()]
    arrays = [leaf for leaf in leaves if isinstance(leaf, mx.array)]
    carried = [array.view(_CARRIERS[array.dtype.size]) for array in arrays]
    if copy:
        carried = [array | mx.array(0, array.dtype) for array in carried]
    mx.eval(carried)
    return carried, [leaf for leaf in leaves if type(leaf) is int]


def unpack(layout: Layers, arrays: Arrays, numbers: Sequence[int], row: kv.RowCache) -> None:
    """Fill a new row with the arrays and numbers of a file, which `fits` has accepted."""
    left, rest = iter(arrays), iter(numbers)

    def value(leaf: Any) -> Any:
        if isinstance(leaf, ArraySpec):
            return mx.array(next(left)).view(getattr(mx, leaf.dtype))
        return leaf if leaf is None else next(rest)

    for layer, cache in zip(layout, _stored(row), strict=True):
        cache.state = tree_unflatten([(path, value(leaf)) for path, leaf in layer.leaves.items()])
    kv.evaluate(row)


def fits(layout: Layers, arrays: Arrays, numbers: Sequence[int], tokens: int) -> bool:
    """Return whether arrays and numbers can be the KV of `tokens` tokens."""
    left, rest = list(arrays), list(numbers)
    for layer in layout:
        own, left = left[: len(layer.arrays)], left[len(layer.arrays) :]
        stated, rest = rest[: len(layer.numbers)], rest[len(layer.numbers) :]
        if not _fits(layer, own, stated, tokens):
            return False
    return not left and not rest


def _fits(layer: Layer, arrays: Arrays, numbers: Sequence[int], tokens: int) -> bool:
    growing, expected = layer.kind in _GROWING, layer.numbers
    shapes = [(_CARRIERS[array.itemsize], array.shape) for array in arrays]
    specs = [(_CARRIERS[getattr(mx, spec.dtype).size], spec.shape) for spec in layer.arrays]
    if len(numbers) != len(expected) or _forms(shapes, growing) != _forms(specs, growing):
        return False
    if not growing or not arrays:  # a recurrent state does not show its number of tokens
        return not growing or numbers == expected
    length, *uneven = {array.shape[2] for array in arrays}
    if uneven or numbers[0] != tokens:
        return False
    if layer.kind in _WHOLE:  # after the offset: group size and bits of quantised KV
        return numbers[1:] == expected[1:] and length == tokens
    if layer.kind in _WINDOWS:  # after the offset: size of the window, then as above
        return numbers[1:] == expected[1:] and length == min(tokens, numbers[1])
    # After the offset: size of a chunk, dropped tokens.
    return numbers[1] == expected[1] and 0 <= numbers[2] <= tokens <= numbers[2] + length


def _forms(arrays: Sequence[tuple[Any, Sequence[int]]], growing: bool) -> list[Any]:
    """Return what arrays have in common with the arrays of a row of any other length."""
    return [(kind, len(shape), *shape[:2], *shape[2 + growing :]) for kind, shape in arrays]


def _layer(cache: Any) -> Layer:
    leaves = {
        path: ArraySpec(str(leaf.dtype).removeprefix("mlx.core."), leaf.shape)
        if isinstance(leaf, mx.array)
        else leaf
        for path, leaf in _leaves(cache).items()
    }
    return Layer(type(cache).__name__, leaves)


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
        leaf is None or type(leaf) is int or (type(leaf) is ArraySpec and hasattr(mx, leaf.dtype))
        for leaf in layer.leaves.values()
    )


def _stored(row: kv.RowCache) -> Iterator[Any]:
    """Yield the caches of a row that are stored.

    A RowShift is not stored, because its shift is 0 for prompts without media.
    """
    return (cache for cache in kv.leaves(row) if not isinstance(cache, RowShift))
