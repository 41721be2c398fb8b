"""The KV of one or several sequences in one layer.

The first token of each sequence is in column 0, and a new token is written in the column after the
sequence's last one. So nothing moves when sequences of different lengths share passes, and tokens
are removed by making the length shorter. mlx-lm's `BatchKVCache` differs in three ways: it aligns
sequences at their ends; its lengths and paddings are on the device, so that a join or a leave waits
for them; and it passes a mask even if nothing has to be masked, which rules out MLX's fused decode
kernels. Models recognise a cache by its attributes (`offset`, `_idx`, `keys`, `bits`), not by its
class.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from backend.engine.caching.shared_numbers import Numbers, first_indices, moves, shared_numbers

STEP: int = KVCache.step  # tokens by which a cache grows

# Buffers of one layer, each [rows, heads, columns, n]; none while the layer is empty.
Parts = tuple[mx.array, ...]

# A layer's cache, and the row of a sequence in it.
Member = tuple[Any, int]


class LayerKV:
    """Keys and values of sequences, each in a row of the same buffers.

    The sequences are in the first rows of the buffers; unused rows may follow. The number of
    columns is a multiple of STEP, as cuDNN's decode kernel requires.
    lengths: number of tokens of each sequence, which is also the position of its next token.
    expected: number of tokens for which buffers are allocated when they grow, so that a long
        prompt's KV is not copied for each of its passes.
    """

    keys: Any = None
    values: Any = None
    expected = 0
    lengths: Numbers

    def __init__(self, lengths: Sequence[int] = (0,), parts: Parts = ()) -> None:
        self.lengths = shared_numbers(tuple(lengths))
        self.parts = parts

    def with_rows(self, lengths: Sequence[int], parts: Parts = ()) -> Self:
        """Return a layer of the same form with the KV of other sequences."""
        return type(self)(lengths, parts)

    def gathered(self, members: Sequence[Member], rows: int = 0) -> Self:
        """Return copies of sequences, in this order, in new buffers that fit another token.

        rows: minimum number of rows, including unused rows.
        """
        lengths = _lengths(members)
        like: Parts = next((layer.parts for layer, _ in members if layer.parts), ())
        shape = max(rows, len(members)), self.buffer_columns(max(lengths) + 1)
        parts = tuple(
            mx.zeros((shape[0], part.shape[1], shape[1], part.shape[3]), part.dtype)
            for part in like
        )
        for first, run in _runs(members):
            layer, row = run[0]
            used = self.columns_of(max(lengths[first : first + len(run)]))
            for source, target in zip(layer.parts, parts, strict=False):
                rows_of_run = slice(row, row + len(run))
                target[first : first + len(run), :, :used] = source[rows_of_run, :, :used]
        return self.with_rows(lengths, parts)

    def rearranged(self, members: Sequence[Member], rows: int) -> Self | None:
        """Return the KV of these sequences in the same buffers, or None if they need new buffers.

        Only sequences of other layers are copied. New buffers are needed if these have more than
        `rows` rows, too few for the sequences, or columns that no sequence needs. This layer
        remains valid: only rows that none of the members needs are written.
        members: some of this layer's sequences, each in its present row, and sequences of other
            layers.
        """
        if not self.parts:
            return None
        lengths = _lengths(members)
        depth, _, columns, _ = self.parts[0].shape
        longest = max(lengths)
        fits = len(members) <= depth <= max(rows, len(members))
        if not fits or not self.columns_of(longest) <= columns <= self.buffer_columns(longest + 1):
            return None
        for row, (layer, index) in enumerate(members):
            if layer is self and index == row:
                continue
            used = self.columns_of(lengths[row])
            # Attention multiplies what it does not see by 0, which does not remove an infinite
            # value that another sequence has left there.
            for part in self.parts:
                part[row : row + 1, :, used:] = 0
            for part, source in zip(self.parts, layer.parts, strict=False):
                part[row : row + 1, :, :used] = source[index : index + 1, :, :used]
        new = copy.copy(self)
        new.lengths = shared_numbers(tuple(lengths))
        return new

    def abandon(self, rows: Collection[int], like: int) -> None:
        """Set the length of rows that no sequence uses to the length of the row `like`.

        Otherwise the length of a longer sequence that has left would require large buffers and a
        mask.
        """
        self.parts = self.parts  # lengths only change when tokens of the latest pass are written
        numbers = (like if row in rows else row for row in range(len(self.lengths)))
        self.lengths = shared_numbers(tuple(self.lengths[row] for row in numbers))

    def extracted(self, row: int) -> Self:
        """Return a copy of one sequence, in buffers that are no larger than its KV."""
        length = self.lengths[row]
        used = self.columns_of(length)
        rows = slice(row, row + 1)
        parts = tuple(mx.contiguous(part[rows, :, :used]) for part in self.parts) if used else ()
        return self.with_rows([length], parts)

    def columns_of(self, length: int) -> int:
        """Return the number of columns that a sequence of this length occupies."""
        return length

    def buffer_columns(self, tokens: int) -> int:
        """Return the number of columns of buffers for sequences of at most this many tokens."""
        return whole_steps(tokens)

    @property
    def buffers(self) -> Parts:
        """Keys and values as they are stored."""
        return () if self.keys is None else (self.keys, self.values)

    @buffers.setter
    def buffers(self, parts: Parts) -> None:
        self.keys, self.values = parts or (None, None)

    @property
    def parts(self) -> Parts:
        """The buffers, with all tokens written."""
        return self.buffers

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self.buffers = parts

    def in_stored_form(self, keys: mx.array, values: mx.array) -> Parts:
        """Return new keys and values in the form in which they are stored."""
        return keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append [sequences, heads, tokens, size]; returns the keys and values of all tokens.

        They have columns for the longest sequence; `make_mask` hides those after shorter ones.
        """
        new, tokens, lengths = self.in_stored_form(keys, values), keys.shape[2], self.lengths
        parts = self.grown(new, lengths.longest + tokens)
        self.parts = written(parts, new, lengths)
        self.lengths = shared_numbers.plus(lengths, tokens)
        return self.keys_and_values()

    def grown(self, new: Parts, columns: int) -> Parts:
        """Return the buffers, with at least this many columns; `new` shows the shape of others."""
        old = self.parts
        if old and columns <= old[0].shape[2]:
            return old
        wide = self.buffer_columns(max(columns, self.expected))
        depth = old[0].shape[0] if old else new[0].shape[0]
        grown = [mx.zeros((depth, part.shape[1], wide, part.shape[3]), part.dtype) for part in new]
        used = self.columns_of(self.lengths.longest)
        for source, target in zip(old, grown, strict=False):
            target[:, :, :used] = source[:, :, :used]
        return tuple(grown)

    def reserve(self, tokens: int) -> bool:
        """Let the buffers grow for more tokens; returns whether they had to."""
        old, columns = self.parts, self.columns_of(self.lengths.longest + tokens)
        if not old or columns <= old[0].shape[2]:
            return False
        self.parts = self.grown(old, columns)
        return True

    @property
    def room(self) -> int:
        """How many more tokens fit in the buffers; no limit if the model has not used the layer."""
        parts = self.parts
        return parts[0].shape[2] - self.lengths.longest if parts else sys.maxsize

    def keys_and_values(self) -> tuple[Any, Any]:
        used = self.columns_of(self.lengths.longest)
        return self.for_model(self.buffers, len(self.lengths), used)

    def for_model(self, parts: Parts, rows: int, columns: int) -> tuple[Any, Any]:
        """Return the first rows and columns in the form that the model accepts."""
        keys, values = (part[:rows, :, :columns] for part in parts)
        return keys, values

    def drop(self, tokens: Sequence[int]) -> None:
        """Remove the last `tokens[i]` tokens of each sequence i, without a copy."""
        self.lengths = shared_numbers(tuple(map(int.__sub__, self.lengths, tokens)))

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        """Remove the last tokens of every sequence; returns how many."""
        tokens = min(tokens, *self.lengths)
        self.drop([tokens] * len(self.lengths))
        return tokens

    def release(self) -> None:
        """Cut the buffers after the longest sequence, and free that part if it is large."""
        used = self.columns_of(self.lengths.longest)
        parts = self.parts
        self.parts = tuple(part[:, :, :used] for part in parts)
        if parts and oversized(used, parts[0].shape[2]):
            self.parts = tuple(map(mx.contiguous, self.parts))  # a slice keeps the buffer alive

    @property
    def offset(self) -> Any:
        """The next token's position: an integer for one sequence, else an array, [rows] int32."""
        return self.lengths[0] if len(self.lengths) == 1 else shared_numbers.array(self.lengths)

    @property
    def _idx(self) -> int:
        """The length of the longest sequence, by the name that models read."""
        return self.lengths.longest

    def make_mask(
        self,
        N: int,  # noqa: N803 the name by which mlx-lm passes it
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """Return the mask for `N` new tokens; None or "causal" if all lengths are equal."""
        lengths = self.lengths
        if lengths.even:
            mask: Any = create_attention_mask(N, lengths.longest, return_array, window_size)
            return mask  # type: ignore[no-any-return]
        now = self.offset[:, None]
        now = now + mx.arange(N) if N > 1 else now
        return visible(mx.arange(lengths.longest + N)[None], now, window_size)

    @property
    def state(self) -> tuple[Any, ...]:
        """The arrays and the length, in the form that mlx-lm's cache of one sequence has."""
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, length = state
        self.lengths = shared_numbers((length,))

    def size(self) -> int:
        return self.columns_of(self.lengths.longest)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def arrays(self) -> Parts:
        """The arrays that have to be computed before the layer is complete."""
        return self.parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.arrays)


class WindowKV(LayerKV):
    """Keys and values of the last `max_size` tokens of each sequence, for a sliding window.

    The token at position p is in column p % max_size, so a new token replaces the oldest.
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


class RowShift:
    """The differences between rows' positions and token counts, stored like one more layer's cache.

    A model with multimodal RoPE gives an image fewer positions than tokens, so the text after the
    image is at position `tokens + shift`; 0 for a row without media. mlx-vlm stores the shift in
    the model, where all rows would share it. Here the shift is the last item in a row's list of
    caches, so it stays with the row when the row joins or leaves a batch, or becomes a cached
    prefix.
    """

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers or (0,)
        self.shifts = mx.array(self._numbers)

    @property
    def shift(self) -> int:
        """The shift of the only row."""
        (number,) = self._numbers
        return number

    @shift.setter
    def shift(self, number: int) -> None:
        self._numbers, self.shifts = (number,), mx.array([number])

    def gathered(self, members: Sequence[tuple[Any, int]], rows: int = 0) -> RowShift:  # noqa: ARG002
        return RowShift(*(layer._numbers[row] for layer, row in members))

    rearranged = gathered

    def extracted(self, row: int) -> RowShift:
        return RowShift(self._numbers[row])

    @property
    def state(self) -> tuple[Any, ...]:
        return ()

    @property
    def nbytes(self) -> int:
        return 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        """Do nothing: a row that starts from a shorter prefix gets another shift."""
        return tokens


def written(parts: Parts, new: Parts, lengths: Numbers, wrap: int = 0) -> Parts:
    """Return the buffers with new tokens written after each sequence's last token.

    wrap: number of columns, if the columns are a ring; otherwise 0.
    """
    rows, _, tokens, _ = new[0].shape
    if lengths.even:
        at = lengths[0] % wrap if wrap else lengths[0]
        for part, fresh in zip(parts, new, strict=True):
            part[:rows, :, at : at + tokens] = fresh
        return parts
    made, heads, columns = [], 0, parts[0].shape[2]
    for part, fresh in zip(parts, new, strict=True):
        if fresh.shape[1] != heads:
            heads = fresh.shape[1]
            indices = _indices(lengths, rows, heads, columns, tokens, wrap)
        made.append(with_values(part, mx.flatten(fresh, 0, 2), indices))
    return tuple(made)


def with_values(part: mx.array, values: mx.array, indices: mx.array) -> mx.array:
    """Return the buffer with values written at flat indices; MLX changes the buffer itself.

    Only whole vectors are written, and unused rows are left alone.
    part: the buffer, [rows, heads, columns, size].
    values: [n, size].
    indices: the flat indices, [n, 1].
    """
    flat = mx.put_along_axis(mx.flatten(part, 0, 2), indices, values, 0)
    return mx.unflatten(flat, 0, part.shape[:3])


def _indices(
    lengths: Numbers, rows: int, heads: int, columns: int, tokens: int, wrap: int
) -> mx.array:
    """Return the flat indices of the tokens after each sequence's last token, [n, 1]."""
    key = (heads, columns, tokens, wrap)
    indices = shared_numbers.made_from(lengths, key)
    if indices is None:
        starts = shared_numbers.array(lengths)
        starts = (starts % wrap if wrap else starts)[:, None, None]
        indices = (starts + first_indices(rows, heads, columns, tokens)).reshape(-1, 1)
        shared_numbers.store(lengths, key, indices)
    return indices


def visible(positions: mx.array, now: mx.array, window: int | None) -> mx.array:
    """Return the attention mask, [rows, 1, new tokens, columns].

    positions, now: of the token in each column, [rows or 1, columns], and of the new tokens.
    """
    there, here = positions[:, None, None], now[:, None, :, None]
    mask: mx.array = there <= here
    return mask & (here < there + window) if window else mask


def _lengths(members: Sequence[Member]) -> list[int]:
    return [layer.lengths[row] for layer, row in members]


def _runs(members: Sequence[Member]) -> Iterator[tuple[int, Sequence[Member]]]:
    """Yield runs of members in adjacent rows of one layer, each after its first member's index."""
    first = 0
    for at in range(1, len(members) + 1):
        layer, row = members[at - 1]
        if at == len(members) or members[at][0] is not layer or members[at][1] != row + 1:
            yield first, members[first:at]
            first = at


def whole_steps(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def oversized(tokens: int, columns: int) -> bool:
    """Return whether buffers have so many columns too many that the tokens should be copied."""
    return columns - tokens >= STEP or 4 * tokens < 3 * columns
