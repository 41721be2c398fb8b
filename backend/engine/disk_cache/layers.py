"""Rows of KV to plain buffers and back: the only module here that touches MLX.

All of it but `buffers` runs on the engine thread, and none of it reads or writes a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from backend.engine import kv
from backend.engine.disk_cache.layout import (
    FULL_KINDS,
    GROWING,
    GROWING_KINDS,
    ITEM_BYTES,
    KINDS,
    ArraySpec,
    LayerSpec,
    Layout,
    ScalarSpec,
    StoredLayer,
    Structure,
    parts,
)
from backend.engine.row_shift import RowShift

# NumPy knows no bfloat16, so every type travels as the unsigned integer of its size.
_CARRIERS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_TYPES: dict[str, mx.Dtype] = {name: getattr(mx, name) for name in ITEM_BYTES}


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A row as it goes to the disk. `arrays` are evaluated; nothing will write to their buffers."""

    layers: tuple[StoredLayer, ...]
    arrays: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def learn_layout(model: Any) -> Layout | None:
    """What a row of this model looks like, seen from one token; None: it cannot be stored."""
    row = kv.new_row(model)
    mx.eval(model(mx.array([[0]]), cache=row))
    kv.evaluate(row)
    layout = []
    for layer in _leaves(row):
        kind = type(layer).__name__
        state = _structure(layer.state, growing=kind in GROWING_KINDS)
        if kind not in KINDS or any(not _storable(part) for part in parts(state)):
            return None
        layout.append(LayerSpec(kind, state))
    return tuple(layout)


def pack(row: kv.RowCache, *, copy: bool) -> PackedRow | None:
    """Evaluated views of the used part of a row's buffers; None: there is no way to store it.

    copy: into buffers of their own. On an NVIDIA GPU a read by the host moves a buffer to other
    memory, under the kernels that use it; with unified memory sharing costs and disturbs nothing.
    """
    layers: list[StoredLayer] = []
    carried: list[mx.array] = []
    for layer in _leaves(row):
        state = list(parts(layer.state))
        arrays = [part for part in state if isinstance(part, mx.array)]
        scalars = [part for part in state if type(part) is int]
        if len(arrays) + len(scalars) + sum(part is None for part in state) < len(state):
            return None
        if type(layer).__name__ in FULL_KINDS:
            arrays = [array[..., : layer.offset, :] for array in arrays]
        specs = tuple(ArraySpec(_name(array), tuple(array.shape)) for array in arrays)
        layers.append(StoredLayer(type(layer).__name__, tuple(scalars), specs))
        carried += [array.view(_CARRIERS[array.dtype.size]) for array in arrays]
    if copy:
        carried = [array | mx.array(0, array.dtype) for array in carried]
    mx.eval(carried)
    return PackedRow(tuple(layers), tuple(carried))


def buffers(packed: PackedRow) -> Iterator[NDArray[Any]]:
    """The arrays' bytes, one after the other, on any thread: evaluated arrays may be read there."""
    for array in packed.arrays:
        yield np.ascontiguousarray(np.asarray(array))


def unpack(
    layout: Layout,
    layers: Sequence[StoredLayer],
    arrays: Sequence[NDArray[Any]],
    row: kv.RowCache,
) -> None:
    """Fill a new row with what was read. The layers have passed `layout.refusal`."""
    left = iter(arrays)
    made: list[mx.array] = []
    for spec, layer, empty in zip(layout, layers, _leaves(row), strict=True):
        filled = [mx.array(next(left)).view(_TYPES[array.dtype]) for array in layer.arrays]
        made += filled
        empty.state = _rebuilt(spec.state, iter(filled), iter(layer.scalars))
    mx.eval(made)


def _structure(state: Any, *, growing: bool) -> Structure:
    """A state with descriptions in place of its values; the name of the type of what has none."""
    if isinstance(state, (tuple, list)):
        return type(state)(_structure(part, growing=growing) for part in state)
    if isinstance(state, mx.array):
        shape = list(state.shape)
        if growing:
            shape[2] = GROWING
        return ArraySpec(_name(state), tuple(shape))
    if type(state) is int:
        return ScalarSpec(state)
    return None if state is None else type(state).__name__


def _storable(part: Any) -> bool:
    if isinstance(part, ArraySpec):
        return part.dtype in ITEM_BYTES
    return part is None or isinstance(part, ScalarSpec)


def _rebuilt(structure: Structure, arrays: Iterator[mx.array], scalars: Iterator[int]) -> Any:
    """A state in the given structure."""
    match structure:
        case tuple() | list():
            return type(structure)(_rebuilt(part, arrays, scalars) for part in structure)
        case ArraySpec():
            return next(arrays)
        case ScalarSpec():
            return next(scalars)
    return None


def _name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _leaves(row: Sequence[Any]) -> Iterator[Any]:
    """Caches that are lists of caches, opened; without shifts, which prompts of text have not."""
    for layer in row:
        if isinstance(layer, RowShift):
            continue
        inner = getattr(layer, "caches", None)
        if inner is None:
            yield layer
        else:
            yield from _leaves(inner)
