"""Small arrays of numbers that every layer of a pass needs, such as the lengths of its rows.

Flat indices count the rows, heads and columns of a layer's buffers as one axis. With them, one
operation writes the tokens of all sequences, each after the last token of the sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np


class Numbers(tuple[int, ...]):
    """A number for each row of a batch, made by `SharedNumbers`."""

    before: tuple[mx.array, int] | None = None  # an array and a number; their sum is `made`
    made: mx.array | None = None  # the numbers as an array; None before it is first needed

    @cached_property
    def longest(self) -> int:
        return max(self)

    @cached_property
    def even(self) -> bool:
        """Whether all numbers are equal."""
        return min(self) == self.longest

    def __deepcopy__(self, _: Any) -> Numbers:
        """Return this object, because neither the numbers nor the arrays change."""
        return self


class SharedNumbers:
    """Makes one array per tuple of numbers, and knows which numbers are in each of these arrays.

    The layers of a pass ask for the same numbers one after the other. The arrays are never written
    to.
    most: how many arrays are remembered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[tuple[int, ...], Numbers] = OrderedDict()
        self._by_array: OrderedDict[int, Numbers] = OrderedDict()  # by the id of the array
        self._sum: tuple[Numbers, int, Numbers] | None = None  # the latest
        # the latest numbers, and their arrays
        self._made: tuple[Numbers, dict[Any, mx.array]] | None = None

    def __call__(self, numbers: tuple[int, ...]) -> Numbers:
        """Return the numbers; equal numbers are the same object as long as they are remembered."""
        if numbers in self._known:
            self._known.move_to_end(numbers)
            return self._known[numbers]
        if len(self._known) >= self._most:
            self._known.popitem(last=False)
        found = self._known[numbers] = Numbers(numbers)
        return found

    def plus(self, numbers: Numbers, added: int) -> Numbers:
        """Return the sums of the numbers and `added`; all layers of a pass get the same object."""
        if self._sum is None or self._sum[0] is not numbers or self._sum[1] != added:
            sums = Numbers(number + added for number in numbers)
            if numbers.made is not None:
                sums.before = numbers.made, added
            elif numbers.before is not None:
                sums.before = numbers.before[0], numbers.before[1] + added
            self._sum = numbers, added, sums
        return self._sum[2]

    def array(self, numbers: Numbers) -> mx.array:
        """Return the numbers as an array, [rows] int32.

        Sums are computed on the device, from an array that is there, because a GPU would have to
        wait for a copy from the host.
        """
        if numbers.made is None:
            before = numbers.before
            array = mx.array(numbers) if before is None else before[0] + before[1]
            numbers.made, numbers.before = array, None
            if len(self._by_array) >= self._most:
                self._by_array.popitem(last=False)
            self._by_array[id(array)] = numbers
        return numbers.made

    def made_from(self, numbers: Numbers, key: Any) -> mx.array | None:
        """Return the array that `store` got for these numbers; None after a call for others."""
        made = self._made
        return made[1].get(key) if made is not None and made[0] is numbers else None

    def store(self, numbers: Numbers, key: Any, array: mx.array) -> None:
        """Store an array for the other layers of a pass.

        key: all that the array depends on, besides the numbers.
        """
        if self._made is None or self._made[0] is not numbers:
            self._made = numbers, {}
        self._made[1][key] = array

    def numbers_of(self, array: mx.array) -> Numbers | None:
        """Return the numbers in an array, without waiting for the device; None if not made here."""
        return self._by_array.get(id(array))

    def clear(self) -> None:
        self._known.clear()
        self._by_array.clear()
        self._sum = self._made = None
        first_indices.cache_clear()
        moves.cache_clear()


shared_numbers = SharedNumbers(64)


@lru_cache(maxsize=8)
def first_indices(rows: int, heads: int, columns: int, tokens: int) -> mx.array:
    """Return the flat indices of the first tokens of each row, [rows, heads, tokens] int32."""
    starts = np.arange(rows * heads, dtype=np.int32).reshape(rows, heads, 1) * columns
    return mx.array(starts + np.arange(tokens, dtype=np.int32))


@lru_cache(maxsize=4)
def moves(
    lengths: tuple[int, ...], counts: tuple[int, ...], heads: int, tokens: int, window: int
) -> tuple[mx.array, mx.array]:
    """Return where to find the tokens of a pass that stay in the window, and where to write them.

    lengths: tokens of each sequence before the pass.
    counts: number of tokens of the pass that remain in each sequence.
    Both results are flat indices: [n] into the tokens of the pass, [rows, heads, tokens], and
    [n, 1] into the window's buffers, [rows, heads, window].
    """
    source, target = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        staying = np.arange(max(count - window, 0), count)
        first = row * heads + np.arange(heads)[:, None]
        source.append((first * tokens + staying).ravel())
        target.append((first * window + (length + staying) % window).ravel())
    indices = np.concatenate(target)[:, None]
    return mx.array(np.concatenate(source).astype(np.int32)), mx.array(indices.astype(np.int32))
