"""KV caches that keep keys and values quantised: one row, and a rectangle of rows.

mlx-lm 0.32.2 has such a cache for one sequence (`QuantizedKVCache`), which cannot enter a batch
and miscounts 3, 5 and 6 bits, and none for several. `QuantizedRow` and `QuantizedBatch` are to
each other what mlx-lm's KVCache and BatchKVCache are, method for method. mlx-lm's attention
recognises them by their attributes `bits` and `group_size`.

Keys and values are quantised as they arrive, also those of the running prefill step, so what a
token sees does not depend on how its prompt was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache, create_causal_mask

# Packed values (uint32), scales and biases, each [rows, heads, tokens, n].
Packed = tuple[mx.array, ...]

_STEP: int = QuantizedKVCache.step  # tokens by which a cache grows


class QuantizedRow(QuantizedKVCache):  # type: ignore[misc]  # mlx-lm is untyped
    """The quantised KV of one sequence of `offset` tokens."""

    keys: Packed | None
    values: Packed | None
    offset: int
    bits: int
    group_size: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Append [1, heads, tokens, size] and return all that is held."""
        self.keys = _appended(self.keys, _quantized(keys, self), self.offset)
        self.values = _appended(self.values, _quantized(values, self), self.offset)
        self.offset += keys.shape[2]
        return _first(self.keys, self.offset), _first(self.values, self.offset)

    def release(self) -> None:
        """Let go of the room after the last token."""
        if self.keys is not None and self.values is not None:
            self.keys = _first(self.keys, self.offset)
            self.values = _first(self.values, self.offset)

    def size(self) -> int:
        return self.offset

    @property
    def nbytes(self) -> int:
        return _bytes(self.keys) + _bytes(self.values)

    @classmethod
    def merge(cls, rows: Sequence[QuantizedRow]) -> QuantizedBatch:
        """A batch of copies of the rows, in their order."""
        batch, *others = [QuantizedBatch.of(row) for row in rows]
        for other in others:
            batch.extend(other)
        return batch


class QuantizedBatch:
    """The quantised KV of several sequences in one rectangle, padded on the left.

    left_padding: [rows] empty places before each row. offset: [rows] tokens of each row, which
    are also its next position. The rectangle is `size()` places long.
    """

    def __init__(self, left_padding: Sequence[int], group_size: int, bits: int) -> None:
        self.keys: Packed | None = None
        self.values: Packed | None = None
        self.left_padding = mx.array(list(left_padding))
        self.offset = -self.left_padding
        self.group_size = group_size
        self.bits = bits
        self._length = 0

    @classmethod
    def of(cls, row: QuantizedRow) -> QuantizedBatch:
        """A batch with a copy of one row."""
        batch = cls([0], row.group_size, row.bits)
        if row.keys is not None and row.values is not None:
            batch.keys = tuple(map(mx.contiguous, _first(row.keys, row.offset)))
            batch.values = tuple(map(mx.contiguous, _first(row.values, row.offset)))
            batch.offset = mx.array([row.offset])
            batch._length = row.offset
        return batch

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Append [rows, heads, tokens, size] and return the whole rectangle."""
        self.keys = _appended(self.keys, _quantized(keys, self), self._length)
        self.values = _appended(self.values, _quantized(values, self), self._length)
        self.offset = self.offset + keys.shape[2]
        self._length += keys.shape[2]
        return _first(self.keys, self._length), _first(self.values, self._length)

    def make_mask(self, N: int, return_array: bool = False, **rest: Any) -> mx.array:  # noqa: N803, ARG002
        """What each of `N` new tokens sees; the names are those by which mlx-lm calls it."""
        mask: mx.array = create_causal_mask(
            N, offset=self._length, left_padding=self.left_padding, **rest
        )
        return mask

    def filter(self, rows: Sequence[int]) -> None:
        """Keep the named rows, without the places that are now empty for all of them."""
        chosen = mx.array(list(rows))
        self.offset = self.offset[chosen]
        self.left_padding = self.left_padding[chosen]
        unused = min(_numbers(self.left_padding))
        if self.keys is not None and self.values is not None:
            self.keys = tuple(part[chosen, :, unused:] for part in self.keys)
            self.values = tuple(part[chosen, :, unused:] for part in self.values)
        self.left_padding = self.left_padding - unused
        self._length -= unused

    def extend(self, other: QuantizedBatch) -> None:
        """Append copies of the rows of `other`, the ends of all rows beside each other."""
        length = max(self._length, other._length)
        shifts = length - self._length, length - other._length
        rows = self.offset.size, other.offset.size
        self.keys = _together([self.keys, other.keys], shifts, rows, length)
        self.values = _together([self.values, other.values], shifts, rows, length)
        self.left_padding = mx.concatenate(
            [self.left_padding + shifts[0], other.left_padding + shifts[1]]
        )
        self.offset = mx.concatenate([self.offset, other.offset])
        self._length = length

    def extract(self, row: int) -> QuantizedRow:
        """A copy of one row."""
        single = QuantizedRow(self.group_size, self.bits)
        if self.keys is not None and self.values is not None:
            start = _numbers(self.left_padding)[row]
            place = (slice(row, row + 1), slice(None), slice(start, self._length))
            single.keys = tuple(mx.contiguous(part[place]) for part in self.keys)
            single.values = tuple(mx.contiguous(part[place]) for part in self.values)
            single.offset = self._length - start
        return single

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that it holds, in the order of mlx-lm's BatchKVCache."""
        return self.keys, self.values, self.offset, self.left_padding, self._length

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        """Take the last tokens off every row; returns how many."""
        tokens = min(self._length, tokens)
        self._length -= tokens
        self.offset = self.offset - tokens
        return tokens

    def size(self) -> int:
        return self._length

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        return _bytes(self.keys) + _bytes(self.values)


def _quantized(values: mx.array, like: QuantizedRow | QuantizedBatch) -> Packed:
    return tuple(mx.quantize(values, group_size=like.group_size, bits=like.bits))


def _appended(held: Packed | None, new: Packed, at: int) -> Packed:
    """`new` written behind the first `at` tokens of what is held; room grows by whole steps."""
    tokens = new[0].shape[2]
    if held is None or at + tokens > held[0].shape[2]:
        room = -(-tokens // _STEP) * _STEP
        rooms = [mx.zeros((*part.shape[:2], room, part.shape[3]), part.dtype) for part in new]
        if held is None:
            held = tuple(rooms)
        else:
            pairs = zip(_first(held, at), rooms, strict=True)
            held = tuple(mx.concatenate([used, more], axis=2) for used, more in pairs)
    for part, fresh in zip(held, new, strict=True):
        part[..., at : at + tokens, :] = fresh
    return held


def _together(
    batches: Sequence[Packed | None], shifts: Sequence[int], rows: Sequence[int], length: int
) -> Packed | None:
    """The rows of several rectangles in one.

    shifts: places by which each moves to the right. rows: how many each has, for one that holds
    nothing yet. length: places in use afterwards.
    """
    filled = [packed for packed in batches if packed is not None]
    if not filled:
        return None
    room = max(length, *(packed[0].shape[2] for packed in filled))
    parts: list[mx.array] = []
    for number, like in enumerate(filled[0]):
        _, heads, _, width = like.shape
        moved = []
        for packed, shift, count in zip(batches, shifts, rows, strict=True):
            nothing = mx.zeros((count, heads, 0, width), like.dtype)
            part = nothing if packed is None else packed[number][:, :, : room - shift]
            after = room - shift - part.shape[2]
            moved.append(mx.pad(part, [(0, 0), (0, 0), (shift, after), (0, 0)]))
        parts.append(mx.concatenate(moved))
    return tuple(parts)


def _first(packed: Packed, tokens: int) -> Packed:
    if packed[0].shape[2] == tokens:
        return packed
    return tuple(part[:, :, :tokens] for part in packed)


def _numbers(array: mx.array) -> list[int]:
    return cast(list[int], array.tolist())


def _bytes(packed: Packed | None) -> int:
    return sum(part.nbytes for part in packed or ())
