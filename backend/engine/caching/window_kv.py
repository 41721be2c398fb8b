"""The KV of a layer with a sliding window, which stores the last `max_size` tokens of a sequence.

The token at position p is in column p % max_size of its row, so a new token replaces the oldest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from backend.engine.caching.layer_kv import (
    LayerKV,
    Parts,
    visible,
    whole_steps,
    with_values,
    written,
)
from backend.engine.caching.shared_numbers import Numbers, moves, shared_numbers


class WindowKV(LayerKV):
    """Keys and values of the last `max_size` tokens of each sequence.

    The tokens of a pass would replace tokens that the first of them attend to. So the tokens of the
    latest pass are stored outside the window, and can be removed, until the window is used again.
    lengths: number of tokens of each sequence, including those that have left the window.
    """

    def __init__(self, max_size: int, lengths: Sequence[int] = (0,), parts: Parts = ()) -> None:
        self.max_size = max_size
        self._outside: Parts = ()  # keys and values of the latest pass
        self._before = Numbers(lengths)  # the lengths before that pass
        super().__init__(lengths, parts)

    def with_rows(self, lengths: Sequence[int], parts: Parts = ()) -> Self:
        return type(self)(self.max_size, lengths, parts)

    def columns_of(self, length: int) -> int:
        return min(length, self.max_size)

    def buffer_columns(self, tokens: int) -> int:
        return min(whole_steps(tokens), self.max_size)

    @property
    def parts(self) -> Parts:
        """The window of each sequence, complete."""
        if self._outside:
            self._move_in()
        return self.buffers

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self.buffers = parts

    @property
    def room(self) -> int:
        parts = self.parts
        return sys.maxsize if parts and parts[0].shape[2] == self.max_size else super().room

    def _move_in(self) -> None:
        """Write the tokens of the latest pass that were not removed into the window."""
        new, self._outside = self._outside, ()
        counts = tuple(map(int.__sub__, self.lengths, self._before))
        if any(counts):
            self.parts = tuple(
                self._moved_in(*pair, counts) for pair in zip(self.buffers, new, strict=True)
            )

    def _moved_in(self, part: mx.array, fresh: mx.array, counts: tuple[int, ...]) -> mx.array:
        _, heads, tokens, _ = fresh.shape
        source, target = moves(self._before, counts, heads, tokens, self.max_size)
        return with_values(part, mx.flatten(fresh, 0, 2)[source], target)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append [sequences, heads, tokens, size]; returns all keys and values to attend to."""
        new, tokens, before = self.in_stored_form(keys, values), keys.shape[2], self.lengths
        longest = before.longest + tokens
        self.parts = parts = self.grown(new, self.columns_of(longest))
        self.lengths = shared_numbers.plus(before, tokens)
        if longest <= self.max_size or tokens == 1:
            wrap = self.max_size if longest > self.max_size else 0
            self.parts = written(parts, new, before, wrap)
        else:
            self._outside, self._before = new, before
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return all keys and values that the latest pass attends to."""
        if not self._outside:
            return super().keys_and_values()
        rows, used = len(self._before), self.columns_of(self._before.longest)
        parts = tuple(
            mx.concatenate([part[:rows, :, :used], fresh], axis=2) if used else fresh
            for part, fresh in zip(self.buffers, self._outside, strict=True)
        )
        return self.for_model(parts, rows, parts[0].shape[2])

    def drop(self, tokens: Sequence[int]) -> None:
        """Remove tokens as in `LayerKV`; from a full window, only tokens of the latest pass."""
        if any(tokens) and not (self._outside or self.is_trimmable()):
            raise ValueError(f"a full window cannot remove {max(tokens)} tokens")
        super().drop(tokens)

    def is_trimmable(self) -> bool:
        """Return whether no token has left the window."""
        return self.lengths.longest <= self.max_size

    def make_mask(
        self,
        N: int,  # noqa: N803 the name by which mlx-lm passes it
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """Return the attention mask of `N` new tokens; None or "causal" if none is needed."""
        window, lengths = window_size or self.max_size, self.lengths
        longest = lengths.longest + N
        if longest <= self.max_size:  # each token's column is its position
            return super().make_mask(N, return_array, window if longest > window else None)
        # A single token replaces the oldest one; several are in columns after the window.
        single = N == 1
        columns = self.columns_of(lengths.longest + single)
        starts = shared_numbers.array(lengths)[:, None]
        if single and window >= self.max_size:
            full = min(lengths) + 1 >= columns
            return None if full else visible(mx.arange(columns)[None], starts, None)
        latest = starts + (single - 1)
        positions = latest - (latest - mx.arange(columns)) % self.max_size
        now = starts + mx.arange(N)
        if not single:
            positions = mx.concatenate([positions, now], axis=1)
        hidden = positions < 0
        return visible(positions, now, window) & ~hidden[:, None, None]

    @property
    def state(self) -> tuple[Any, ...]:
        self.parts = self.parts  # with the tokens of the latest pass
        return self.keys, self.values, self.offset, self.max_size

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, length, self.max_size = state
        self.lengths = shared_numbers((length,))

    @property
    def arrays(self) -> Parts:
        return (*self.buffers, *self._outside)
