"""Quantised KV caches, for one sequence and for several.

mlx-lm has a cache for a single sequence (`QuantizedKVCache`), which cannot be batched and
miscounts bytes with 3, 5 and 6 bits, and none for several. mlx-lm's attention recognises quantised
caches by their attributes `bits` and `group_size`.

Keys and values are quantised when they are appended, also those of the current prefill step, so the
result does not depend on how the prompt was split into steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from backend.engine.caching.rectangle import Parts, Rectangle, appended, oversized

# Packed values (uint32), scales and biases, each [sequences, heads, tokens, n].
Packed = tuple[mx.array, ...]


class QuantizedRow(QuantizedKVCache):  # type: ignore[misc]  # mlx-lm is untyped
    """The quantised KV of one sequence of `offset` tokens."""

    keys: Packed | None
    values: Packed | None
    offset: int
    bits: int
    group_size: int
    expected = 0  # as in `RowKV`

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Append [1, heads, tokens, size]; returns all keys and values."""
        at, expected = self.offset, self.expected
        self.keys = appended(self.keys or (), _quantized(keys, self), at, expected)
        self.values = appended(self.values or (), _quantized(values, self), at, expected)
        self.offset += keys.shape[2]
        return _first(self.keys, self.offset, 1), _first(self.values, self.offset, 1)

    def release(self) -> None:
        """Release the unused space after the last token, if it is a large part."""
        if self.keys is None or self.values is None:
            return
        copied = oversized(self.offset, self.keys[0].shape[2])
        self.keys = _first(self.keys, self.offset, 1)
        self.values = _first(self.values, self.offset, 1)
        if copied:
            self.keys, self.values = map(_copied, (self.keys, self.values))

    def size(self) -> int:
        return self.offset

    @property
    def nbytes(self) -> int:
        return _bytes(self.keys) + _bytes(self.values)


class QuantizedBatch(Rectangle):
    """The quantised KV of several sequences in one rectangle, padded on the left."""

    keys: Packed | None
    values: Packed | None

    def __init__(
        self, lengths: Sequence[int], parts: Parts = (), *, group_size: int, bits: int
    ) -> None:
        super().__init__(lengths, parts)
        self.group_size = group_size
        self.bits = bits

    @property
    def parts(self) -> Parts:
        return (*(self.keys or ()), *(self.values or ()))

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self.keys, self.values = parts[:3], parts[3:]

    def fresh(self, keys: mx.array, values: mx.array) -> Parts:
        return (*_quantized(keys, self), *_quantized(values, self))

    def keys_and_values(self) -> tuple[Packed, Packed]:
        assert self.keys is not None
        assert self.values is not None
        rows = len(self.lengths)
        return _first(self.keys, self._idx, rows), _first(self.values, self._idx, rows)


def _quantized(values: mx.array, like: QuantizedRow | QuantizedBatch) -> Packed:
    return tuple(mx.quantize(values, group_size=like.group_size, bits=like.bits))


def _first(packed: Packed, tokens: int, rows: int) -> Packed:
    if packed[0].shape[2] == tokens and packed[0].shape[0] == rows:
        return packed
    return tuple(part[:rows, :, :tokens] for part in packed)


def _copied(packed: Packed) -> Packed:
    """Buffers of their own; a slice keeps the whole buffer alive."""
    packed = tuple(map(mx.contiguous, packed))
    mx.async_eval(packed)
    return packed


def _bytes(packed: Packed | None) -> int:
    return sum(part.nbytes for part in packed or ())
