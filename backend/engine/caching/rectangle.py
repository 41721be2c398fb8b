"""The KV of several sequences in one rectangle, as mlx-lm 0.32.2's attention needs it.

Sequences are aligned at their ends, so shorter ones have empty columns on the left. mlx-lm's own
`BatchKVCache` keeps lengths and paddings on the device: it waits for the device whenever a sequence
joins or leaves, and passes a mask even if nothing has to be masked, which rules out MLX's fused
decode kernels. Here both are Python integers. Models recognise a cache by its attributes (`offset`,
`left_padding`, `_idx`, `keys`, `bits`), not by its class.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, create_attention_mask, create_causal_mask

from backend.engine.caching.shared_numbers import Numbers, shared_numbers

STEP: int = KVCache.step  # tokens by which a cache grows

Range = tuple[int, int]  # columns, half-open

# Buffers of one layer, each [sequences, heads, columns, n]; none while the layer is empty.
Parts = tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Where the KV of one sequence is.

    row: its index on the first axis of `parts`. ranges: its indices, oldest first; two ranges if a
    window has wrapped around. length: tokens of the sequence, of which a window may hold fewer.
    """

    parts: Parts
    row: int
    ranges: tuple[Range, ...]
    length: int

    @property
    def places(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def copy(self) -> Parts:
        """Buffers that hold only this sequence."""
        rows = slice(self.row, self.row + 1)
        pieces = [[part[rows, :, start:stop] for start, stop in self.ranges] for part in self.parts]
        return tuple(
            mx.contiguous(piece[0]) if len(piece) == 1 else mx.concatenate(piece, axis=2)
            for piece in pieces
        )


class RowKV(KVCache):  # type: ignore[misc]  # mlx-lm is untyped
    """Keys and values of one sequence.

    Unlike those of mlx-lm's own class, the buffers have whole steps of columns also after a cut,
    as cuDNN's decode kernel needs it. expected: tokens for which they get room when they grow, so
    that a long prompt's KV is not copied for each of its passes.
    """

    keys: Any
    values: Any
    expected = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [1, heads, tokens, size]; returns all keys and values."""
        parts = () if self.keys is None else (self.keys, self.values)
        self.keys, self.values = appended(parts, (keys, values), self.offset, self.expected)
        self.offset += keys.shape[2]
        return self.keys_and_values()  # type: ignore[no-any-return]


class Rectangle:
    """Base of the batched caches of keys and values.

    lengths: tokens of each sequence, which is also its next token's position. `_idx`: columns in
    use. holes: per sequence, the columns after its first token that hold no token, because a wrong
    guess was removed there. The sequences are in the first rows of the buffers, which may have
    spare rows after them.
    """

    keys: Any = None
    values: Any = None
    expected = 0  # as in `RowKV`
    lengths: Numbers

    def __init__(self, lengths: Sequence[int], parts: Parts = ()) -> None:
        self.lengths = shared_numbers(tuple(lengths))
        self._idx = max(self.lengths)
        self._right_padding = [0] * len(self.lengths)
        self.holes: list[tuple[Range, ...]] = [()] * len(self.lengths)
        if parts:
            self.parts = parts

    @classmethod
    def of(cls, spans: Sequence[Span], rows: int = 0, **settings: Any) -> Any:
        """A rectangle of copies, with room up to the next whole step.

        rows: number of rows, spare ones included; if it is less than the number of spans, that is
        used.
        """
        lengths = [span.length for span in spans]
        return cls(lengths, packed(spans, whole_steps(max(lengths) + 1), rows), **settings)

    def rearranged(self, spans: Sequence[Span], rows: int) -> Any:
        """A rectangle with these sequences in the same buffers, or None if it needs new ones.

        Only sequences that come from elsewhere, or change their row, are copied. The
        buffers are kept unless they have more than `rows` rows, too few for the sequences, or
        columns that no sequence needs. spans: some of this rectangle's sequences, none in the way
        of another, and sequences of other caches. This rectangle stays as it is: only rows that
        none of the spans needs are written.
        """
        if not self.parts or any(self._right_padding):
            return None
        lengths = [span.length for span in spans]
        depth, _, columns, _ = self.parts[0].shape
        fits = len(spans) <= depth <= max(rows, len(spans))
        if not fits or columns > whole_steps(max(lengths) + 1) or self._idx < max(lengths):
            return None
        stays = [
            bool(span.parts) and span.parts[0] is self.parts[0] and span.row == row
            for row, span in enumerate(spans)
        ]
        moved = {row: self._padded(span) for row, span in enumerate(spans) if not stays[row]}
        for row, copies in moved.items():
            for part, one in zip(self.parts, copies, strict=True):
                part[row : row + 1, :, : self._idx] = one
        new = copy.copy(self)
        new.lengths = shared_numbers(tuple(lengths))
        new._right_padding = [0] * len(spans)
        new.holes = [self.holes[row] if stay else () for row, stay in enumerate(stays)]
        return new

    def _padded(self, span: Span) -> Parts:
        """A copy of a sequence that ends at the last column in use.

        The columns before it become zero: attention multiplies what it does not see by 0, which
        does not remove an infinite value that another sequence has left there.
        """
        padding = self._idx - span.places
        empty = [
            mx.zeros((1, part.shape[1], padding, part.shape[3]), part.dtype) for part in self.parts
        ]
        if not span.parts:
            return tuple(empty)
        if not padding:
            return span.copy()
        pairs = zip(empty, span.copy(), strict=True)
        return tuple(mx.concatenate(list(pair), axis=2) for pair in pairs)

    @property
    def parts(self) -> Parts:
        return () if self.keys is None else (self.keys, self.values)

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self.keys, self.values = parts

    @property
    def depth(self) -> int:
        """The number of rows, spare ones included."""
        return self.parts[0].shape[0] if self.parts else 0

    def span(self, row: int) -> Span:
        return Span(self.parts, row, self._ranges(row), self.lengths[row])

    def _start(self, row: int) -> int:
        """The column of a sequence's first token."""
        end = self._idx - self._right_padding[row]
        return end - self.lengths[row] - sum(stop - start for start, stop in self.holes[row])

    def fresh(self, keys: mx.array, values: mx.array) -> Parts:
        """New keys and values in the form in which they are kept."""
        return keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append [sequences, heads, tokens, size] and return the whole rectangle."""
        tokens = keys.shape[2]
        self.parts = appended(self.parts, self.fresh(keys, values), self._idx, self.expected)
        self._idx += tokens
        self.lengths = shared_numbers.plus(self.lengths, tokens)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        rows = len(self.lengths)
        return self.keys[:rows, :, : self._idx], self.values[:rows, :, : self._idx]

    def prepare(self, *, lengths: Sequence[int], right_padding: Sequence[int]) -> None:  # noqa: ARG002
        """Announce that the next pass ends with this much padding for each sequence."""
        self._right_padding = list(right_padding)

    def finalize(self) -> None:
        """Align the sequences at their ends again after a pass with padding."""
        pairs = zip(self.lengths, self._right_padding, strict=True)
        self.lengths = shared_numbers(tuple(length - padding for length, padding in pairs))

    def make_room(self, tokens: int, *, holes: bool = True) -> None:
        """Prepare for a pass over this many tokens: close the holes if that avoids growing.

        holes: whether the model's masks can skip holes; if not, they are closed in any case.
        """
        if any(self.holes) and not (holes and self._idx + tokens <= self.parts[0].shape[2]):
            spans = [self.span(row) for row in range(len(self.lengths))]
            columns = whole_steps(max(self.lengths) + tokens)
            self.parts = packed(spans, columns, self.depth)
            self._idx, self.holes = max(self.lengths), [()] * len(self.lengths)

    def drop(self, tokens: Sequence[int]) -> None:
        """Remove this many of each sequence's latest tokens.

        Nothing is copied: a sequence that now ends before another gets a hole.
        """
        kept = [
            _shortened(self._ranges(row), self.lengths[row] - count)
            for row, count in enumerate(tokens)
        ]
        self.lengths = shared_numbers(tuple(map(int.__sub__, self.lengths, tokens)))
        self._idx = max((own[-1][1] for own in kept if own), default=0)
        self.holes = [_gaps(own, self._idx) if own else () for own in kept]

    def _ranges(self, row: int) -> tuple[Range, ...]:
        """The columns of a sequence's tokens."""
        end = self._idx - self._right_padding[row]
        return _between(self.holes[row], self._start(row), end)

    @property
    def offset(self) -> mx.array:
        return shared_numbers.array(self.lengths)

    @property
    def left_padding(self) -> mx.array:
        return on_device(self._idx - length for length in self.lengths)

    def make_mask(
        self,
        N: int,  # noqa: N803 the name by which mlx-lm passes it
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """The mask for `N` new tokens; None or "causal" if no sequence is padded."""
        if any(self.holes):
            rows = range(len(self.lengths))
            ranges = tuple(map(self._ranges, rows))
            positions = _positions(self.lengths, ranges, self._idx, N)
            now = positions[:, self._idx :]
            mask: mx.array | str | None = _visible(positions, now, window_size)
        elif min(self.lengths) == self._idx:
            mask = create_attention_mask(N, self._idx, return_array, window_size)
        else:
            mask = padded_mask(N, self._idx, window_size, self.left_padding)
        return mask

    @property
    def state(self) -> tuple[Any, Any]:
        return self.keys, self.values

    def size(self) -> int:
        return self._idx

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def on_device(numbers: Iterable[int]) -> mx.array:
    """The numbers, as the same array while they do not change."""
    return shared_numbers.array(shared_numbers(tuple(numbers)))


def padded_mask(new: int, past: int, window: int | None, paddings: mx.array) -> mx.array:
    """The mask of `new` tokens after `past` columns, [rows, 1, new, past + new].

    paddings: [rows], the columns before each sequence. For one token it takes fewer operations than
    mlx-lm's mask.
    """
    if new > 1:
        mask: mx.array = create_causal_mask(new, past, window, left_padding=paddings)
        return mask
    if window and past >= window:
        paddings = mx.maximum(paddings, past + 1 - window)
    return mx.arange(past + 1) >= paddings[:, None, None, None]


@lru_cache(maxsize=4)
def _positions(
    lengths: tuple[int, ...], ranges: tuple[tuple[Range, ...], ...], places: int, new: int
) -> mx.array:
    """The position of the token in each column, `new` tokens included; -1 if there is none.

    [sequences, columns + new] int32.
    """
    found = np.full((len(lengths), places + new), -1, dtype=np.int32)
    for row, length, own in zip(found, lengths, ranges, strict=True):
        position = 0
        for start, stop in own:
            row[start:stop] = np.arange(position, position + stop - start)
            position += stop - start
        row[places:] = np.arange(length, length + new)
    return mx.array(found)


def forget_arrays() -> None:
    """Drop the cached position arrays and masks; called when a model is dropped."""
    shared_numbers.clear()
    _positions.cache_clear()


def _visible(positions: mx.array, now: mx.array, window: int | None) -> mx.array:
    """Which columns are visible to the tokens at the positions `now`, [sequences, new]."""
    there, here = positions[:, None, None], now[:, None, :, None]
    mask: mx.array = (there >= 0) & (there <= here)
    return mask & (here < there + window) if window else mask


def _between(holes: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """The ranges from `start` to `stop` without the holes, which are sorted and inside."""
    borders = [start, *(border for hole in holes for border in hole), stop]
    pairs = zip(borders[::2], borders[1::2], strict=True)
    return tuple(pair for pair in pairs if pair[0] < pair[1]) or ((stop, stop),)


def _shortened(ranges: Sequence[Range], places: int) -> list[Range]:
    """The first `places` columns of ranges."""
    kept: list[Range] = []
    for start, stop in ranges:
        if places > 0 and start < stop:
            kept.append((start, min(stop, start + places)))
            places -= stop - start
    return kept


def _gaps(ranges: Sequence[Range], stop: int) -> tuple[Range, ...]:
    """The gaps between the ranges, and the gap from the last one to `stop`."""
    borders = [*(border for own in ranges for border in own), stop]
    pairs = zip(borders[1::2], borders[2::2], strict=True)
    return tuple(pair for pair in pairs if pair[0] < pair[1])


def whole_steps(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def oversized(tokens: int, columns: int) -> bool:
    """Whether so many columns are too many for `tokens` tokens, so that these should be copied."""
    return columns - tokens >= STEP or 4 * tokens < 3 * columns


def appended(old: Parts, new: Parts, at: int, expected: int = 0) -> Parts:
    """Write `new` after the first `at` columns of the first rows; buffers grow by whole steps.

    expected: columns for which buffers that grow get room.
    """
    rows, tokens = new[0].shape[0], new[0].shape[2]
    if not old or at + tokens > old[0].shape[2]:
        room = whole_steps(max(at + tokens, expected)) - at
        depth = old[0].shape[0] if old else rows
        rooms = [mx.zeros((depth, part.shape[1], room, part.shape[3]), part.dtype) for part in new]
        if old:
            pairs = zip(old, rooms, strict=True)
            rooms = [mx.concatenate([used[:, :, :at], more], axis=2) for used, more in pairs]
        old = tuple(rooms)
    for part, fresh in zip(old, new, strict=True):
        part[:rows, :, at : at + tokens] = fresh
    return old


def packed(spans: Sequence[Span], room: int, rows: int = 0) -> Parts:
    """Copies of the sequences, aligned at their ends, in buffers with `room` columns.

    Each sequence is copied once; neighbours that are already aligned, together. rows: as in
    `Rectangle.of`.
    """
    like = next((span.parts for span in spans if span.parts), ())
    width = max(span.places for span in spans)
    depth = max(rows, len(spans))
    shapes = [(depth, part.shape[1], room, part.shape[3]) for part in like]
    copies = [mx.zeros(shape, part.dtype) for shape, part in zip(shapes, like, strict=True)]
    for first, run in _runs(spans):
        longest = max(run, key=lambda span: span.places)
        if not longest.places:
            continue
        together = slice(run[0].row, run[0].row + len(run))
        for source, target in zip(longest.parts, copies, strict=True):
            at = width - longest.places
            for start, stop in longest.ranges:
                where = (slice(first, first + len(run)), slice(None), slice(at, at + stop - start))
                target[where] = source[together, :, start:stop]
                at += stop - start
    return tuple(copies)


def _runs(spans: Sequence[Span]) -> Iterator[tuple[int, list[Span]]]:
    """Groups of sequences that can be copied at once, each with its first index."""
    first, run, longest = 0, [spans[0]], spans[0]
    for at, (before, span) in enumerate(pairwise(spans), 1):
        together = (
            span.row == before.row + 1
            and _side_by_side(span.ranges, longest.ranges)
            and len(span.parts) == len(before.parts)
            and all(map(lambda one, other: one is other, span.parts, before.parts))
        )
        if not together:
            yield first, run
            first, run, longest = at, [], span
        run.append(span)
        longest = max(longest, span, key=lambda one: one.places)
    yield first, run


def _side_by_side(one: Sequence[Range], other: Sequence[Range]) -> bool:
    """Whether one's columns are the last of the other's, or vice versa."""
    shorter, longer = sorted((one, other), key=lambda ranges: sum(b - a for a, b in ranges))
    last = longer[len(longer) - len(shorter) :]
    if len(last) != len(shorter) or shorter[0][1] != last[0][1] or shorter[0][0] < last[0][0]:
        return False
    return list(shorter[1:]) == list(last[1:])
