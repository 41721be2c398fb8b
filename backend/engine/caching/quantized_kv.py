"""Quantised KV of one or several sequences.

mlx-lm has a cache for a single sequence (`QuantizedKVCache`), which cannot be batched and
miscounts bytes with 3, 5 and 6 bits, and none for several. mlx-lm's attention recognises quantised
caches by their attributes `bits` and `group_size`.

Keys and values are quantised when they are appended, also those of the current prefill step, so the
result does not depend on how the prompt was split into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from backend.engine.caching.layer_kv import LayerKV, Parts
from backend.engine.caching.shared_numbers import shared_numbers

# Packed values (uint32), scales and biases, each [sequences, heads, tokens, n].
Packed = tuple[mx.array, ...]


class QuantizedKV(LayerKV):
    """keys, values: packed values (uint32), scales and biases of each."""

    keys: Packed | None
    values: Packed | None

    def __init__(
        self, group_size: int, bits: int, lengths: Sequence[int] = (0,), parts: Parts = ()
    ) -> None:
        super().__init__(lengths, parts)
        self.group_size = group_size
        self.bits = bits

    def with_rows(self, lengths: Sequence[int], parts: Parts = ()) -> Self:
        return type(self)(self.group_size, self.bits, lengths, parts)

    @property
    def parts(self) -> Parts:
        return (*(self.keys or ()), *(self.values or ()))

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self.keys, self.values = parts[:3] or None, parts[3:] or None

    def fresh(self, keys: mx.array, values: mx.array) -> Parts:
        return (*self._packed(keys), *self._packed(values))

    def _packed(self, values: mx.array) -> Packed:
        return tuple(mx.quantize(values, group_size=self.group_size, bits=self.bits))

    def keys_and_values(self) -> tuple[Packed, Packed]:
        rows, used = len(self.lengths), self.lengths.longest
        used_parts = tuple(part[:rows, :, :used] for part in self.parts)
        return used_parts[:3], used_parts[3:]

    @property
    def state(self) -> tuple[Any, ...]:
        return self.keys, self.values, self.offset, self.group_size, self.bits

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        keys, values, length, self.group_size, self.bits = state
        self.parts = (*(keys or ()), *(values or ()))
        self.lengths = shared_numbers((length,))
