"""The KV of several sequences in a sliding-window layer, which keeps the last `max_size` tokens.

It is the batched counterpart of mlx-lm's RotatingKVCache, as `Rectangle` is of KVCache. In decode,
a full window is used as a ring buffer: the newest token replaces the oldest. Appending several
tokens at once first restores chronological order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache, create_causal_mask

from backend.engine.caching.rectangle import (
    Parts,
    Rectangle,
    Span,
    on_device,
    packed,
    padded_mask,
    whole_steps,
)
from backend.engine.caching.shared_numbers import shared_numbers


class BatchWindow(Rectangle):
    """lengths: tokens of each sequence, including those that have left the window.

    `_idx`: the index after the newest token. rotated: whether the oldest token is at that index.
    """

    def __init__(self, lengths: Sequence[int], parts: Parts = (), *, max_size: int) -> None:
        super().__init__(lengths, parts)
        self.max_size = max_size
        self.rotated = False
        self._idx = min(self._idx, max_size)

    @classmethod
    def of(cls, spans: Sequence[Span], rows: int = 0, **settings: Any) -> BatchWindow:  # noqa: ARG003
        """Copies of the spans, with room up to the next allocation step or the window's end.

        There are no spare rows: a window's size is bounded, so it is copied at every change.
        """
        window = settings["max_size"]
        places = max(span.places for span in spans)
        parts = packed(spans, min(whole_steps(places + 1), window))
        return cls([span.length for span in spans], parts, **settings)

    @property
    def _places(self) -> int:
        """The number of indices in use."""
        return self.keys.shape[2] if self.rotated else self._idx

    def span(self, row: int) -> Span:
        end = self._places - self._right_padding[row]
        length = self.lengths[row]
        start = end - min(length, end, self.max_size)
        ranges = _in_time(start, end, self._idx if self.rotated else 0, self._places)
        return Span(self.parts, row, ranges, length)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append [sequences, heads, tokens, size]; returns all keys and values to attend to."""
        tokens = keys.shape[2]
        if tokens == 1:
            self._append_one((keys, values))
        else:
            self._append((keys, values))
        self.lengths = shared_numbers.plus(self.lengths, tokens)
        return self.keys_and_values()

    def _append_one(self, new: Parts) -> None:
        """Append one token; in a full window it replaces the oldest one."""
        parts = self.parts
        if not parts or (self._places == parts[0].shape[2] < self.max_size):
            room = min(whole_steps(self._idx + 1), self.max_size) - self._idx
            rooms = [mx.zeros((*part.shape[:2], room, part.shape[3]), part.dtype) for part in new]
            if parts:
                pairs = zip(parts, rooms, strict=True)
                rooms = [mx.concatenate([used, more], axis=2) for used, more in pairs]
            parts = tuple(rooms)
        if self._places > self.max_size:
            start = self._places - self.max_size
            parts = tuple(part[:, :, start : self._idx] for part in parts)
            self._idx = self.max_size
        if self._idx == self.max_size:
            self._idx, self.rotated = 0, True
        for part, fresh in zip(parts, new, strict=True):
            part[..., self._idx : self._idx + 1, :] = fresh
        self.parts = parts
        self._idx += 1

    def _append(self, new: Parts) -> None:
        """Add several tokens after those that are still in the window of the first of them."""
        if self.parts:
            places = self._places
            start = max(places - self.max_size + 1, 0)
            ranges = _in_time(start, places, self._idx if self.rotated else 0, places)
            new = tuple(
                mx.concatenate([*(part[:, :, a:b] for a, b in ranges), fresh], axis=2)
                for part, fresh in zip(self.parts, new, strict=True)
            )
        self.parts = new
        self._idx, self.rotated = new[0].shape[2], False

    def drop(self, tokens: Sequence[int]) -> None:
        """Remove the last `tokens[i]` tokens of each sequence i.

        Allowed only right after a pass that appended several tokens: what the first of them
        attended to is still stored then, so the window stays complete.
        """
        kept = self._idx - min(tokens)
        self.parts = tuple(part[:, :, :kept] for part in self.parts)
        self.lengths = shared_numbers(tuple(map(int.__sub__, self.lengths, tokens)))
        self._idx = kept
        self._right_padding = [count - min(tokens) for count in tokens]
        if any(self._right_padding):
            spans = [self.span(row) for row in range(len(tokens))]
            self._idx = max(span.places for span in spans)
            self.parts = packed(spans, self._idx)
            self._right_padding = [0] * len(tokens)

    def keys_and_values(self) -> tuple[Any, Any]:
        places = self._places
        return self.keys[:, :, :places], self.values[:, :, :places]

    @property
    def left_padding(self) -> mx.array:
        return on_device(max(self._places - length, 0) for length in self.lengths)

    def make_mask(
        self,
        N: int,  # noqa: N803 the name by which mlx-lm passes it
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """The attention mask of `N` new tokens; None or "causal" if no sequence is padded."""
        window = window_size or self.max_size
        past = min(self._places, self.max_size - 1)
        paddings = tuple(max(past - length, 0) for length in self.lengths)
        padded = any(paddings)
        fits = past + N <= window
        if not padded and fits and not (return_array and N > 1):
            return None if N == 1 else "causal"
        mask: mx.array
        if padded:
            mask = padded_mask(N, past, window, on_device(paddings))
        else:
            mask = create_causal_mask(N, past, window)
        if N == 1 and self._places >= self.max_size:
            # The new token will be at index `at`, so the oldest one is at `at + 1`.
            at = self._idx if self.rotated and self._idx < self.max_size else 0
            mask = mx.roll(mask, at + 1, -1)
        return mask

    def size(self) -> int:
        return min(self._places, self.max_size)


def row_span(row: RotatingKVCache) -> Span:
    """The span of mlx-lm's cache of one sequence."""
    if row.keys is None:
        return Span((), 0, ((0, 0),), 0)
    room = row.keys.shape[2]
    turned = row._idx < min(row.offset, room)
    places = room if turned else row._idx
    start = places - min(row.offset, row.max_size)
    ranges = _in_time(start, places, row._idx if turned else 0, places)
    return Span((row.keys, row.values), 0, ranges, row.offset)


def _in_time(start: int, stop: int, oldest: int, places: int) -> tuple[tuple[int, int], ...]:
    """The index ranges in a ring of the tokens `start` to `stop`, counted from the oldest."""
    border = places - oldest
    early = (start + oldest, min(stop, border) + oldest)
    late = (max(start, border) - border, stop - border)
    return tuple(part for part in (early, late) if part[0] < part[1]) or ((0, 0),)
