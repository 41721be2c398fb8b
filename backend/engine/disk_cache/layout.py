"""The shape that a model's KV must have in a file, as plain data, and what is refused.

A checksum tells that a file is whole, not that it is sane: whoever can write into the folder can
write a right checksum. So before anything of a file reaches MLX, its layers are held against the
layout that the loaded model itself has shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GROWING = -1  # in a shape: the axis of the tokens

# Nested tuples and lists of ArraySpec, ScalarSpec and None, in the order of a cache's state.
Structure = Any

ITEM_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array of a layer's state; an axis of size GROWING has one place per token."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def admits(self, other: ArraySpec) -> bool:
        """Whether another array has this type and these sizes, and some size where it may grow."""
        if self.dtype != other.dtype or len(self.shape) != len(other.shape):
            return False
        sizes = zip(self.shape, other.shape, strict=True)
        return all(mine in (GROWING, size) for mine, size in sizes)


@dataclass(frozen=True, slots=True)
class ScalarSpec:
    """A number of a layer's state, as it is after one token."""

    value: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One cache (no list of caches): its class by name, and the structure of its state."""

    kind: str
    state: Structure

    @property
    def arrays(self) -> list[ArraySpec]:
        return [part for part in parts(self.state) if isinstance(part, ArraySpec)]

    @property
    def scalars(self) -> list[int]:
        return [part.value for part in parts(self.state) if isinstance(part, ScalarSpec)]


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One cache as a file or a row has it."""

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


def refusal(layout: Layout, layers: Sequence[StoredLayer], tokens: int) -> str:
    """Why layers cannot be the KV of so many tokens of this model; '' when they can."""
    if len(layers) != len(layout):
        return f"it has {len(layers)} caches, and the model has {len(layout)}"
    for at, (spec, layer) in enumerate(zip(layout, layers, strict=True)):
        if layer.kind != spec.kind:
            return f"cache {at} is a {layer.kind[:40]!r}, and the model's is a {spec.kind!r}"
        if len(layer.arrays) != len(spec.arrays) or len(layer.scalars) != len(spec.scalars):
            return f"cache {at} has another number of parts than the model's"
        for mine, other in zip(spec.arrays, layer.arrays, strict=True):
            if not mine.admits(other):
                return f"cache {at} holds arrays of another shape or type than the model's"
        rule = _RULES[spec.kind] if spec.arrays else _unused
        if not rule(spec, layer, tokens):
            return f"cache {at} does not hold {tokens} tokens"
    return ""


def _lengths(layer: StoredLayer) -> set[int]:
    return {array.shape[2] for array in layer.arrays}


def _unused(spec: LayerSpec, layer: StoredLayer, _tokens: int) -> bool:
    """A cache that the model never writes to stays as it was made."""
    return list(layer.scalars) == spec.scalars


def _full(spec: LayerSpec, layer: StoredLayer, tokens: int) -> bool:
    """offset; in a quantised cache then group size and bits."""
    offset, *fixed = layer.scalars
    return offset == tokens and fixed == spec.scalars[1:] and _lengths(layer) == {tokens}


def _window(spec: LayerSpec, layer: StoredLayer, tokens: int) -> bool:
    """offset, tokens that are never dropped, size of the window, place of the next write."""
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
    """offset, size of a chunk, tokens dropped at the front."""
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
    """No numbers: a state of fixed size says nothing of how many tokens went into it."""
    return not layer.scalars and tokens > 0


# By the names of the classes of mlx-lm 0.32.2 and of `quantized_kv`; numbers as in their `state`.
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
