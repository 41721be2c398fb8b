"""The KV of one or several sequences in one layer.

The first token of each sequence is in column 0, and a new token is written at its own sequence's
length. So nothing moves when sequences of different lengths share passes, and tokens are taken back
by a shorter length. mlx-lm's own `BatchKVCache` aligns sequences at their ends, keeps lengths and
paddings on the device, where a join or a leave waits for them, and passes a mask even if nothing
has to be masked, which rules out MLX's fused decode kernels. Models recognise a cache by its
attributes (`offset`, `_idx`, `keys`, `bits`), not by its class.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from backend.engine.caching.flat_places import first_places, placed
from backend.engine.caching.shared_numbers import Numbers, shared_numbers

STEP: int = KVCache.step  # tokens by which a cache grows

# Buffers of one layer, each [rows, heads, columns, n]; none while the layer is empty.
Parts = tuple[mx.array, ...]

# A layer's cache, and the row of a sequence in it.
Member = tuple[Any, int]


class LayerKV:
    """Keys and values of sequences, each in a row of the same buffers.

    lengths: tokens of each sequence, which is also its next token's position. expected: tokens for
    which the buffers get room when they grow, so that a long prompt's KV is not copied for each of
    its passes. The sequences are in the first rows of the buffers, which may have unused rows after
    them. Buffers have whole steps of columns, as cuDNN's decode kernel needs it.
    """

    keys: Any = None
    values: Any = None
    expected = 0
    lengths: Numbers

    def __init__(self, lengths: Sequence[int] = (0,), parts: Parts = ()) -> None:
        self.lengths = shared_numbers(tuple(lengths))
        self.parts = parts

    def with_rows(self, lengths: Sequence[int], parts: Parts = ()) -> Self:
        """The KV of other sequences in a layer of the same form."""
        return type(self)(lengths, parts)

    def gathered(self, members: Sequence[Member], rows: int = 0) -> Self:
        """Copies of sequences, in this order, in new buffers with room for another token.

        rows: number of rows, with unused ones; if it is less than the number of sequences, that
        is used.
        """
        lengths = _lengths(members)
        like: Parts = next((layer.parts for layer, _ in members if layer.parts), ())
        shape = max(rows, len(members)), self.room(max(lengths) + 1)
        parts = tuple(
            mx.zeros((shape[0], part.shape[1], shape[1], part.shape[3]), part.dtype)
            for part in like
        )
        for first, run in _runs(members):
            layer, row = run[0]
            used = self.held(max(lengths[first : first + len(run)]))
            for source, target in zip(layer.parts, parts, strict=False):
                rows_of_run = slice(row, row + len(run))
                target[first : first + len(run), :, :used] = source[rows_of_run, :, :used]
        return self.with_rows(lengths, parts)

    def rearranged(self, members: Sequence[Member], rows: int) -> Self | None:
        """The KV of these sequences in the same buffers, or None if it needs new ones.

        Only sequences that come from elsewhere are copied. The buffers are kept unless they have
        more than `rows` rows, too few for the sequences, or columns that no sequence needs.
        members: some of this layer's sequences, each in its present row, and sequences of other
        layers. This layer stays as it is: only rows that none of the members needs are written.
        """
        if not self.parts:
            return None
        lengths = _lengths(members)
        depth, _, columns, _ = self.parts[0].shape
        fits = len(members) <= depth <= max(rows, len(members))
        if not fits or not self.held(max(lengths)) <= columns <= self.room(max(lengths) + 1):
            return None
        for row, (layer, place) in enumerate(members):
            if layer is self and place == row:
                continue
            used = self.held(lengths[row])
            # Attention multiplies what it does not see by 0, which does not remove an infinite
            # value that another sequence has left there.
            for part in self.parts:
                part[row : row + 1, :, used:] = 0
            for part, source in zip(self.parts, layer.parts, strict=False):
                part[row : row + 1, :, :used] = source[place : place + 1, :, :used]
        new = copy.copy(self)
        new.lengths = shared_numbers(tuple(lengths))
        return new

    def abandon(self, rows: Collection[int], like: int) -> None:
        """Give rows that no sequence needs the length of row `like`.

        A longer sequence that was in such a row would keep the buffers large, and need a mask.
        """
        self.parts = self.parts  # lengths only change when tokens of the latest pass are in place
        numbers = (like if row in rows else row for row in range(len(self.lengths)))
        self.lengths = shared_numbers(tuple(self.lengths[row] for row in numbers))

    def taken(self, row: int) -> Self:
        """A copy of one sequence, in buffers that are no larger than its KV."""
        length = self.lengths[row]
        used = self.held(length)
        rows = slice(row, row + 1)
        parts = tuple(mx.contiguous(part[rows, :, :used]) for part in self.parts) if used else ()
        return self.with_rows([length], parts)

    def held(self, length: int) -> int:
        """The columns that a sequence of this length takes."""
        return length

    def room(self, tokens: int) -> int:
        """The columns of buffers for sequences of at most this many tokens."""
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
        """The buffers, with all tokens in place."""
        return self.buffers

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self.buffers = parts

    def fresh(self, keys: mx.array, values: mx.array) -> Parts:
        """New keys and values in the form in which they are kept."""
        return keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append [sequences, heads, tokens, size]; returns the keys and values of all tokens.

        They have columns for the longest sequence; `make_mask` hides those after shorter ones.
        """
        new, tokens, lengths = self.fresh(keys, values), keys.shape[2], self.lengths
        parts = self.grown(new, lengths.longest + tokens)
        self.parts = written(parts, new, lengths)
        self.lengths = shared_numbers.plus(lengths, tokens)
        return self.keys_and_values()

    def grown(self, new: Parts, columns: int) -> Parts:
        """The buffers with at least this many columns, in the shape of `new` if there are none."""
        old = self.parts
        if old and columns <= old[0].shape[2]:
            return old
        used = self.held(self.lengths.longest) if old else 0
        room = self.room(max(columns, self.expected)) - used
        depth = old[0].shape[0] if old else new[0].shape[0]
        rooms = [mx.zeros((depth, part.shape[1], room, part.shape[3]), part.dtype) for part in new]
        if old:
            pairs = zip(old, rooms, strict=True)
            rooms = [mx.concatenate([part[:, :, :used], more], axis=2) for part, more in pairs]
        return tuple(rooms)

    def keys_and_values(self) -> tuple[Any, Any]:
        rows, used = len(self.lengths), self.held(self.lengths.longest)
        return self.given(tuple(part[:rows, :, :used] for part in self.buffers))

    def given(self, parts: Parts) -> tuple[Any, Any]:
        """Return keys and values as the model gets them."""
        keys, values = parts
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
        used = self.held(self.lengths.longest)
        parts = self.parts
        self.parts = tuple(part[:, :, :used] for part in parts)
        if parts and oversized(used, parts[0].shape[2]):
            self.parts = tuple(map(mx.contiguous, self.parts))  # a slice keeps the buffer alive
            mx.async_eval(self.parts)

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
        """The mask for `N` new tokens; None or "causal" if all sequences are equally long."""
        lengths = self.lengths
        if lengths.even:
            mask: Any = create_attention_mask(N, lengths.longest, return_array, window_size)
            return mask  # type: ignore[no-any-return]
        now = self.offset[:, None]
        now = now + mx.arange(N) if N > 1 else now
        return visible(mx.arange(lengths.longest + N)[None], now, window_size)

    @property
    def state(self) -> tuple[Any, ...]:
        """What describes the layer, in the form of mlx-lm's cache of one sequence."""
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, length = state
        self.lengths = shared_numbers((length,))

    def size(self) -> int:
        return self.held(self.lengths.longest)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def arrays(self) -> Parts:
        """The arrays that have to be computed before the layer is complete."""
        return self.parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.arrays)


def written(parts: Parts, new: Parts, lengths: Numbers, wrap: int = 0) -> Parts:
    """Write the first tokens after each sequence's length. wrap: columns, if they are a ring."""
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
            places = _places(lengths, rows, heads, columns, tokens, wrap)
        made.append(placed(part, mx.flatten(fresh, 0, 2), places))
    return tuple(made)


def _places(
    lengths: Numbers, rows: int, heads: int, columns: int, tokens: int, wrap: int
) -> mx.array:
    """The places in flat buffers of the tokens after each sequence's length, [n, 1]."""
    key = (heads, columns, tokens, wrap)
    places = shared_numbers.made_from(lengths, key)
    if places is None:
        starts = shared_numbers.array(lengths)
        starts = (starts % wrap if wrap else starts)[:, None, None]
        places = (starts + first_places(rows, heads, columns, tokens)).reshape(-1, 1)
        shared_numbers.keep(lengths, key, places)
    return places


def visible(positions: mx.array, now: mx.array, window: int | None) -> mx.array:
    """The mask of tokens at the positions `now`, [rows, new], as [rows, 1, new, columns].

    positions: [rows or 1, columns], of the token in each column.
    """
    there, here = positions[:, None, None], now[:, None, :, None]
    mask: mx.array = there <= here
    return mask & (here < there + window) if window else mask


def _lengths(members: Sequence[Member]) -> list[int]:
    return [layer.lengths[row] for layer, row in members]


def _runs(members: Sequence[Member]) -> Iterator[tuple[int, Sequence[Member]]]:
    """Members in adjacent rows of one layer, which are copied together, with the first's index."""
    first = 0
    for at in range(1, len(members) + 1):
        layer, row = members[at - 1]
        if at == len(members) or members[at][0] is not layer or members[at][1] != row + 1:
            yield first, members[first:at]
            first = at


def whole_steps(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def oversized(tokens: int, columns: int) -> bool:
    """Whether so many columns are too many for `tokens` tokens, so that these should be copied."""
    return columns - tokens >= STEP or 4 * tokens < 3 * columns
