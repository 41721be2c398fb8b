"""The structure of a model's KV as plain data, and conversion between rows and plain buffers.

A right checksum shows that a file is undamaged, not that its contents are valid: anyone who can
write to the folder can compute one. So before anything from a file reaches MLX, its layers are
compared with the layout of the loaded model. Functions that use MLX arrays run on the engine
thread, except `buffers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from backend.engine.caching import kv
from backend.engine.caching.rectangle import RowKV
from backend.engine.caching.row_shift import RowShift

GROWING = -1  # in a shape: the axis that has one index per token

# Nested tuples and lists of ArraySpec, int and None, in the order of a cache's `state`; with the
# values after one token.
Structure = Any

_NAMES = "float32 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
DTYPES: Mapping[str, mx.Dtype] = {name: getattr(mx, name) for name in _NAMES.split()}
# NumPy has no bfloat16, so every type is viewed as the unsigned integer of its size.
_CARRIERS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array of a layer's state; an axis of size GROWING has one index per token."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].size

    def admits(self, other: ArraySpec) -> bool:
        """Whether another array has this type and shape, with any size for a GROWING axis."""
        if self.dtype != other.dtype or len(self.shape) != len(other.shape):
            return False
        sizes = zip(self.shape, other.shape, strict=True)
        return all(mine in (GROWING, size) for mine, size in sizes)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One cache (not a CacheList): the name of its class, and the structure of its state."""

    kind: str
    state: Structure

    @property
    def arrays(self) -> list[ArraySpec]:
        return [part for part in parts(self.state) if isinstance(part, ArraySpec)]

    @property
    def scalars(self) -> list[int]:
        return [part for part in parts(self.state) if isinstance(part, int)]


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One cache of a file or row: the name of its class, and the contents of its state."""

    kind: str
    scalars: tuple[int, ...]
    arrays: tuple[ArraySpec, ...]


Layout = tuple[LayerSpec, ...]


def parts(structure: Structure) -> Iterator[Any]:
    """The leaves of nested tuples and lists, in order."""
    if isinstance(structure, (tuple, list)):
        for inner in structure:
            yield from parts(inner)
    else:
        yield structure


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A row to be written to disk. `arrays` are evaluated, and nothing changes their buffers."""

    layers: tuple[StoredLayer, ...]
    arrays: tuple[mx.array, ...]


def learn_layout(model: Any) -> Layout | None:
    """The layout of a model's rows, after one token; None if they cannot be stored.

    Nothing is computed: the shapes are enough.
    """
    row = kv.new_row(model)
    model(mx.array([[0]]), cache=row)
    layout = []
    for layer in _stored(row):
        kind = _kind(layer)
        state = _structure(layer.state, growing=kind in GROWING_KINDS)
        if kind not in KINDS or any(not _storable(part) for part in parts(state)):
            return None
        layout.append(LayerSpec(kind, state))
    return tuple(layout)


def pack(row: kv.RowCache, *, copy: bool) -> PackedRow | None:
    """Evaluated views of the used part of a row's buffers; None if it cannot be stored.

    copy: copy them to buffers of their own. On an NVIDIA GPU, a read by the host moves a buffer to
    other memory while kernels may be using it; with unified memory, views are safe and free.
    """
    layers: list[StoredLayer] = []
    carried: list[mx.array] = []
    for layer in _stored(row):
        state = list(parts(layer.state))
        arrays = [part for part in state if isinstance(part, mx.array)]
        scalars = [part for part in state if type(part) is int]
        if len(arrays) + len(scalars) + sum(part is None for part in state) < len(state):
            return None
        if _kind(layer) in FULL_KINDS:
            arrays = [array[..., : layer.offset, :] for array in arrays]
        specs = tuple(ArraySpec(_name(array), tuple(array.shape)) for array in arrays)
        layers.append(StoredLayer(_kind(layer), tuple(scalars), specs))
        carried += [array.view(_CARRIERS[array.dtype.size]) for array in arrays]
    if copy:
        carried = [array | mx.array(0, array.dtype) for array in carried]
    mx.eval(carried)
    return PackedRow(tuple(layers), tuple(carried))


def buffers(packed: PackedRow) -> Iterator[NDArray[Any]]:
    """The arrays' buffers, one by one. For any thread, because the arrays are evaluated."""
    for array in packed.arrays:
        yield np.ascontiguousarray(np.asarray(array))


def unpack(
    layout: Layout,
    layers: Sequence[StoredLayer],
    arrays: Sequence[NDArray[Any]],
    row: kv.RowCache,
) -> None:
    """Fill a new row with what was read. Call it only for layers that `refusal` accepts."""
    left = iter(arrays)
    made: list[mx.array] = []
    for spec, layer, empty in zip(layout, layers, _stored(row), strict=True):
        filled = [mx.array(next(left)).view(DTYPES[array.dtype]) for array in layer.arrays]
        made += filled
        empty.state = _rebuilt(spec.state, iter(filled), iter(layer.scalars))
    mx.eval(made)


def refusal(layout: Layout, layers: Sequence[StoredLayer], tokens: int) -> str:
    """Why layers cannot be the KV of `tokens` tokens of this model; '' if they can."""
    if len(layers) != len(layout):
        return f"it has {len(layers)} caches, but the model has {len(layout)}"
    for at, (spec, layer) in enumerate(zip(layout, layers, strict=True)):
        if layer.kind != spec.kind:
            return f"cache {at} is a {layer.kind[:40]!r}, but the model's is a {spec.kind!r}"
        if len(layer.arrays) != len(spec.arrays) or len(layer.scalars) != len(spec.scalars):
            return f"cache {at} has a different number of parts than the model's"
        for mine, other in zip(spec.arrays, layer.arrays, strict=True):
            if not mine.admits(other):
                return f"cache {at} has arrays of a different shape or type than the model's"
        rule = _RULES[spec.kind] if spec.arrays else _unused
        if not rule(spec, layer, tokens):
            return f"cache {at} does not hold {tokens} tokens"
    return ""


def _lengths(layer: StoredLayer) -> set[int]:
    return {array.shape[2] for array in layer.arrays}


def _unused(spec: LayerSpec, layer: StoredLayer, _tokens: int) -> bool:
    """For a cache that the model never writes to: it must be unchanged."""
    return list(layer.scalars) == spec.scalars


def _full(spec: LayerSpec, layer: StoredLayer, tokens: int) -> bool:
    """Numbers: offset; in a quantised cache also group size and bits."""
    offset, *fixed = layer.scalars
    return offset == tokens and fixed == spec.scalars[1:] and _lengths(layer) == {tokens}


def _window(spec: LayerSpec, layer: StoredLayer, tokens: int) -> bool:
    """Numbers: offset, tokens that are never dropped, size of the window, next write index."""
    offset, *fixed, place = layer.scalars
    (length, *uneven) = _lengths(layer)
    return (
        offset == tokens
        and fixed == spec.scalars[1:-1]
        and not uneven
        and min(tokens, fixed[1]) <= length
        and 0 <= place <= length
    )


def _chunk(spec: LayerSpec, layer: StoredLayer, tokens: int) -> bool:
    """Numbers: offset, size of a chunk, tokens dropped at the front."""
    offset, size, dropped = layer.scalars
    (length, *uneven) = _lengths(layer)
    return (
        offset == tokens
        and size == spec.scalars[1]
        and 0 <= dropped <= offset
        and not uneven
        and offset - dropped <= length
    )


def _recurrent(_spec: LayerSpec, layer: StoredLayer, tokens: int) -> bool:
    """No numbers: a recurrent state has a fixed size and does not show its number of tokens."""
    return not layer.scalars and tokens > 0


# Checks by class name (mlx-lm 0.32.2 and `quantized_kv`); the numbers are in the order of `state`.
_RULES: Mapping[str, Callable[[LayerSpec, StoredLayer, int], bool]] = {
    "KVCache": _full,
    "QuantizedRow": _full,
    "RotatingKVCache": _window,
    "ChunkedKVCache": _chunk,
    "ArraysCache": _recurrent,
}
KINDS = frozenset(_RULES)
FULL_KINDS = frozenset(kind for kind, rule in _RULES.items() if rule is _full)
GROWING_KINDS = KINDS - {"ArraysCache"}


def _kind(layer: Any) -> str:
    return "KVCache" if isinstance(layer, RowKV) else type(layer).__name__


def _structure(state: Any, *, growing: bool) -> Structure:
    """A state with arrays replaced by ArraySpec, and unknown values by the name of their type."""
    if isinstance(state, (tuple, list)):
        return type(state)(_structure(part, growing=growing) for part in state)
    if isinstance(state, mx.array):
        shape = list(state.shape)
        if growing:
            shape[2] = GROWING
        return ArraySpec(_name(state), tuple(shape))
    return state if state is None or type(state) is int else type(state).__name__


def _storable(part: Any) -> bool:
    if isinstance(part, ArraySpec):
        return part.dtype in DTYPES
    return part is None or isinstance(part, int)


def _rebuilt(structure: Structure, arrays: Iterator[mx.array], scalars: Iterator[int]) -> Any:
    """A state with this structure and these values."""
    match structure:
        case tuple() | list():
            return type(structure)(_rebuilt(part, arrays, scalars) for part in structure)
        case ArraySpec():
            return next(arrays)
        case int():
            return next(scalars)
    return None


def _name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _stored(row: kv.RowCache) -> Iterator[Any]:
    """The caches of a row that are stored: all but a RowShift, which is 0 for prompts of text."""
    return (layer for layer in kv.leaves(row) if not isinstance(layer, RowShift))
