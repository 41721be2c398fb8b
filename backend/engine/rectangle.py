"""The KV of several sequences in one rectangle, as the attention of mlx-lm 0.32.2 wants it.

Sequences end beside each other, so shorter ones have empty places on the left. mlx-lm's own
`BatchKVCache` keeps lengths and paddings on the device: it waits for the device whenever a
sequence joins or leaves, and passes a mask even where nothing is to be masked, which keeps MLX from
its fused decode kernels. Here both are numbers of the host. Models know a cache by its attributes
(`offset`, `left_padding`, `_idx`, `keys`, `bits`), none of them by its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask, create_causal_mask

STEP: int = KVCache.step  # tokens by which a cache grows

# Buffers of one layer, each [sequences, heads, places, n]; none while the layer is empty.
Parts = tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Where the KV of one sequence lies.

    row: its place on the first axis of `parts`. ranges: the places that it has, oldest first; two
    ranges where a window has turned over. length: tokens of the sequence, of which a window may
    hold fewer.
    """

    parts: Parts
    row: int
    ranges: tuple[tuple[int, int], ...]
    length: int

    @property
    def places(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def copy(self) -> Parts:
        """Buffers that hold the sequence and nothing else."""
        rows = slice(self.row, self.row + 1)
        pieces = [[part[rows, :, start:stop] for start, stop in self.ranges] for part in self.parts]
        return tuple(
            mx.contiguous(piece[0]) if len(piece) == 1 else mx.concatenate(piece, axis=2)
            for piece in pieces
        )


class Rectangle:
    """What the batched caches of keys and values share.

    lengths: tokens of each sequence, the next one's position. `_idx`: places in use.
    """

    keys: Any = None
    values: Any = None

    def __init__(self, lengths: Sequence[int], parts: Parts = ()) -> None:
        self.lengths = list(lengths)
        self._idx = max(self.lengths)
        self._right_padding = [0] * len(self.lengths)
        if parts:
            self.parts = parts

    @classmethod
    def of(cls, spans: Sequence[Span], **settings: Any) -> Any:
        """A rectangle of copies, with room up to the next whole step."""
        lengths = [span.length for span in spans]
        return cls(lengths, packed(spans, whole_steps(max(lengths) + 1)), **settings)

    @property
    def parts(self) -> Parts:
        return () if self.keys is None else (self.keys, self.values)

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self.keys, self.values = parts

    def span(self, row: int) -> Span:
        length, end = self.lengths[row], self._idx - self._right_padding[row]
        return Span(self.parts, row, ((end - length, end),), length)

    def fresh(self, keys: mx.array, values: mx.array) -> Parts:
        """New keys and values in the form in which they are kept."""
        return keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append [sequences, heads, tokens, size] and return the whole rectangle."""
        tokens = keys.shape[2]
        self.parts = appended(self.parts, self.fresh(keys, values), self._idx)
        self._idx += tokens
        self.lengths = [length + tokens for length in self.lengths]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        return self.keys[:, :, : self._idx], self.values[:, :, : self._idx]

    def prepare(self, *, lengths: Sequence[int], right_padding: Sequence[int]) -> None:  # noqa: ARG002
        """The next tokens of each sequence are followed by so many that are none."""
        self._right_padding = list(right_padding)

    def finalize(self) -> None:
        """The padded tokens are in. Gather the rectangle before the next ones: ends differ now."""
        pairs = zip(self.lengths, self._right_padding, strict=True)
        self.lengths = [length - padding for length, padding in pairs]

    @property
    def offset(self) -> mx.array:
        return on_device(tuple(self.lengths))

    @property
    def left_padding(self) -> mx.array:
        return on_device(tuple(self._idx - length for length in self.lengths))

    def make_mask(
        self,
        N: int,  # noqa: N803 the name by which mlx-lm passes it
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """What each of `N` new tokens sees; None or "causal" where no sequence is padded."""
        if min(self.lengths) == self._idx:
            mask: mx.array | str | None = create_attention_mask(
                N, self._idx, return_array, window_size
            )
        else:
            mask = create_causal_mask(N, self._idx, window_size, left_padding=self.left_padding)
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


@lru_cache(maxsize=64)
def on_device(numbers: tuple[int, ...]) -> mx.array:
    """One array for all layers that ask for the same numbers. Nobody writes to it."""
    return mx.array(numbers)


def whole_steps(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def appended(held: Parts, new: Parts, at: int) -> Parts:
    """`new` written behind the first `at` places of what is held; room grows by whole steps."""
    tokens = new[0].shape[2]
    if not held or at + tokens > held[0].shape[2]:
        room = whole_steps(at + tokens) - at
        rooms = [mx.zeros((*part.shape[:2], room, part.shape[3]), part.dtype) for part in new]
        if held:
            pairs = zip(held, rooms, strict=True)
            rooms = [mx.concatenate([used[:, :, :at], more], axis=2) for used, more in pairs]
        held = tuple(rooms)
    for part, fresh in zip(held, new, strict=True):
        part[..., at : at + tokens, :] = fresh
    return held


def packed(spans: Sequence[Span], room: int) -> Parts:
    """Copies of the sequences, their ends beside each other, in buffers of `room` places.

    Each sequence is copied once; neighbours that lie beside each other already, together.
    """
    like = next((span.parts for span in spans if span.parts), ())
    width = max(span.places for span in spans)
    shapes = [(len(spans), part.shape[1], room, part.shape[3]) for part in like]
    copies = [mx.zeros(shape, part.dtype) for shape, part in zip(shapes, like, strict=True)]
    for first, run in _runs(spans):
        longest = max(run, key=lambda span: span.places)
        if not longest.places:
            continue
        rows = slice(run[0].row, run[0].row + len(run))
        for source, target in zip(longest.parts, copies, strict=True):
            at = width - longest.places
            for start, stop in longest.ranges:
                where = (slice(first, first + len(run)), slice(None), slice(at, at + stop - start))
                target[where] = source[rows, :, start:stop]
                at += stop - start
    return tuple(copies)


def _runs(spans: Sequence[Span]) -> Iterator[tuple[int, list[Span]]]:
    """Stretches of sequences that can be copied at once, each with its first place."""
    first, run = 0, [spans[0]]
    for at, (before, span) in enumerate(pairwise(spans), 1):
        together = (
            span.row == before.row + 1
            and span.ranges[-1][1] == before.ranges[-1][1]
            and len(span.parts) == len(before.parts)
            and all(map(lambda one, other: one is other, span.parts, before.parts))
        )
        if not together:
            yield first, run
            first, run = at, []
        run.append(span)
    yield first, run
