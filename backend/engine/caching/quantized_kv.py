"""Quantised KV of one or several sequences; keys and values may have different numbers of bits.

mlx-lm has a cache for a single sequence (`QuantizedKVCache`), which cannot be batched and
miscounts bytes with 3, 5 and 6 bits, and no cache for several sequences or for sliding windows. Its
attention recognises quantised caches by their attributes `bits` and `group_size`, and multiplies
with the packed values. It looks the function for that up in its module at each call, so `attend`
can replace the function, to support different numbers of bits. A model whose attention has sinks,
or does not call mlx-lm's function, gets a layer's keys and values dequantised.

Keys and values are quantised when they are appended. The current prefill pass attends to them in
quantised form too, so the result does not depend on how the prompt was divided into passes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import mlx.core as mx

from backend.engine.caching.layer_kv import LayerKV, Parts, WindowKV
from backend.engine.caching.shared_numbers import shared_numbers
from backend.engine.device import multiplies_packed, reads_views
from backend.engine.small_attention import masked

# Packed values (uint32), scales and biases, each [sequences, heads, tokens, n].
_PACKED = 3
_MODULES = ("mlx_lm.models.base", "mlx_vlm.models.base")
_NAME = "quantized_scaled_dot_product_attention"


class Bits(NamedTuple):
    """Bits per key and per value; 0 means that they are not quantised."""

    key: int
    value: int


@dataclass(frozen=True, slots=True)
class Packing:
    """How a layer's KV is quantised.

    group_size: values that share a scale and a bias.
    dense: whether the model gets keys and values dequantised.
    """

    bits: Bits
    group_size: int
    dense: bool = False

    def packed(self, part: mx.array, bits: int) -> Parts:
        """Return keys or values in the form in which they are stored."""
        return tuple(mx.quantize(part, group_size=self.group_size, bits=bits)) if bits else (part,)

    def unpacked(self, part: Any, bits: int) -> Any:
        """Return stored keys or values without quantisation."""
        if not bits:
            return part
        packed, scales, biases = part
        return mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=bits)

    def size(self, part: Any) -> int:
        """Return the head size of keys or values, before quantisation."""
        return int(part[1].shape[3] * self.group_size if type(part) is tuple else part.shape[3])

    def dense_bytes(self, layer: LayerKV) -> int:
        """Return the bytes per token of keys and values that are dequantised in a pass."""
        if not (self.dense and layer.parts):
            return 0
        pairs = zip((layer.keys, layer.values), self.bits, strict=True)
        return sum(
            self.size(part) * part[1].shape[1] * part[1].dtype.size for part, bits in pairs if bits
        )


class _Quantized(LayerKV):
    """Base of the classes below.

    The model gets whole buffers where MLX copies a slice before it is multiplied or dequantised.
    These have columns for the next tokens only, because each pass reads all of them.

    keys, values: one array each, or a tuple of `_PACKED` arrays.
    """

    packing: Packing
    _expected = 0

    def pack(self, packing: Packing) -> None:
        self.packing = packing
        self.group_size = packing.group_size
        if not packing.dense:
            self.bits: tuple[int, ...] = packing.bits  # mlx-lm's sign of packed values

    @property
    def _slices(self) -> bool:
        """Whether the model gets slices of packed buffers."""
        return reads_views() and not self.packing.dense

    @property
    def expected(self) -> int:
        return self._expected if self._slices else 0

    @expected.setter
    def expected(self, tokens: int) -> None:
        self._expected = tokens

    @property
    def buffers(self) -> Parts:
        return () if self.keys is None else (*_parts(self.keys), *_parts(self.values))

    @buffers.setter
    def buffers(self, parts: Parts) -> None:
        self.keys, self.values = self._pair(parts) if parts else (None, None)

    def _pair(self, parts: Parts) -> tuple[Any, Any]:
        """Return parts as keys and values."""
        count = _PACKED if self.packing.bits.key else 1
        keys, values = parts[:count], parts[count:]
        return keys if count > 1 else keys[0], values if len(values) > 1 else values[0]

    def in_stored_form(self, keys: mx.array, values: mx.array) -> Parts:
        packed, (key, value) = self.packing.packed, self.packing.bits
        return (*packed(keys, key), *packed(values, value))

    def for_model(self, parts: Parts, rows: int, columns: int) -> tuple[Any, Any]:
        packing = self.packing
        if packing.dense:
            whole = zip(self._pair(tuple(part[:rows] for part in parts)), packing.bits, strict=True)
            keys, values = (packing.unpacked(*part)[:, :, :columns] for part in whole)
            return keys, values
        if not self._slices:
            self.bits = (*packing.bits, columns)
            columns = parts[0].shape[2]
        return self._pair(tuple(part[:rows, :, :columns] for part in parts))

    @property
    def state(self) -> tuple[Any, ...]:
        keys, values, *rest = super().state
        return (keys, values, *rest, self.packing.group_size, *self.packing.bits)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        # A part of several arrays comes as a list from what stores a state in a file.
        keys, values, length, *_ = state
        self.keys, self.values = (
            tuple(part) if type(part) is list else part for part in (keys, values)
        )
        self.lengths = shared_numbers((length,))


class QuantizedKV(_Quantized):
    """Keys and values of all tokens."""

    def __init__(self, packing: Packing, lengths: Sequence[int] = (0,), parts: Parts = ()) -> None:
        self.pack(packing)
        super().__init__(lengths, parts)

    def with_rows(self, lengths: Sequence[int], parts: Parts = ()) -> Self:
        return type(self)(self.packing, lengths, parts)


class QuantizedWindowKV(_Quantized, WindowKV):
    """Keys and values of the tokens in a sliding window."""

    def __init__(
        self, packing: Packing, max_size: int, lengths: Sequence[int] = (0,), parts: Parts = ()
    ) -> None:
        self.pack(packing)
        super().__init__(max_size, lengths, parts)

    def with_rows(self, lengths: Sequence[int], parts: Parts = ()) -> Self:
        return type(self)(self.packing, self.max_size, lengths, parts)


def _parts(part: Any) -> Parts:
    return part if type(part) is tuple else (part,)


def install_attention() -> None:
    """Use `attend` in those of the two libraries that are loaded."""
    for name in _MODULES:
        module: Any = sys.modules.get(name)
        if module is not None:
            getattr(module, _NAME)  # fails if a release has renamed it
            setattr(module, _NAME, attend)


def attend(
    queries: mx.array,
    q_keys: Any,
    q_values: Any,
    scale: float,
    mask: mx.array | str | None,
    group_size: int = 64,
    bits: int | Sequence[int] = 8,
) -> mx.array:
    """Return the attention of queries, [rows, heads, tokens, size], with the libraries' arguments.

    q_keys, q_values: packed values, scales and biases, or an array that is not quantised.
    bits: bits per number: one for both, or `Bits`; 0 means not quantised.
    """
    key_bits, value_bits, *known = (bits, bits) if isinstance(bits, int) else bits
    rows, heads, tokens, size = queries.shape
    kv_heads = (q_keys[0] if key_bits else q_keys).shape[1]
    # Heads that share keys and values are an axis of their own.
    grouped = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, tokens, size)
    scores = _product(grouped, q_keys, group_size, key_bits, transpose=True)
    columns = scores.shape[-1]
    seen = known[0] if known and known[0] else columns
    if isinstance(mask, str):
        mask = mx.arange(seen - tokens, seen)[:, None] >= mx.arange(columns)
    elif seen < columns:
        mask = mx.arange(columns) < seen if mask is None else _widened(mask, columns)
    if mask is not None:
        scores = masked(scores, mask)
    weights = mx.softmax(scores, axis=-1, precise=True)
    found = _product(weights, q_values, group_size, value_bits, transpose=False)
    return found.reshape(rows, heads, tokens, found.shape[-1])


def _widened(mask: mx.array, columns: int) -> mx.array:
    """Return the mask with further columns, which it hides."""
    hidden = False if mask.dtype == mx.bool_ else mx.finfo(mask.dtype).min
    more = [(0, 0)] * (mask.ndim - 1) + [(0, columns - mask.shape[-1])]
    return mx.pad(mask, more, constant_values=mx.array(hidden, mask.dtype))


def _product(
    left: mx.array, right: Any, group_size: int, bits: int, *, transpose: bool
) -> mx.array:
    """Return products, [rows, heads of keys, heads that share them, tokens, n].

    The heads that share keys are rows of the same product: MLX copies keys that are broadcast on a
    CPU, and multiplies several tokens by them wrongly on Metal
    (https://github.com/ml-explore/mlx/issues/3480). A single token is multiplied rightly, and for
    long values faster, because Metal divides products of vectors among more threads. With a
    fast BLAS on a CPU, many rows are multiplied by dequantised values, in about half of the time.
    """
    *batch, shared, tokens, _ = left.shape
    if bits and tokens == 1 and reads_views():
        packed, scales, biases = (mx.expand_dims(part, 2) for part in right)
        flat = left
    else:
        flat = mx.flatten(left, 2, 3)
        if bits and not multiplies_packed(flat.shape[2]):
            packed, scales, biases = right
            right = mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)
            bits = 0
        if not bits:
            plain: mx.array = flat @ (right.swapaxes(-1, -2) if transpose else right)
            return plain.reshape(*batch, shared, tokens, plain.shape[-1])
        packed, scales, biases = right
    found = mx.quantized_matmul(
        flat, packed, scales, biases, transpose=transpose, group_size=group_size, bits=bits
    )
    return found.reshape(*batch, shared, tokens, found.shape[-1])
