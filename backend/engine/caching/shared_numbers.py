"""Small arrays of numbers that every layer of a pass needs, such as the lengths of its rows."""

from __future__ import annotations

from collections import OrderedDict

import mlx.core as mx


class SharedNumbers:
    """Makes one array per tuple of numbers, and knows the numbers of the arrays that it made.

    The arrays are never written to. most: how many of them are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._arrays: OrderedDict[tuple[int, ...], mx.array] = OrderedDict()
        self._numbers: dict[int, tuple[int, ...]] = {}  # by the id of the array

    def __call__(self, numbers: tuple[int, ...]) -> mx.array:
        if numbers in self._arrays:
            self._arrays.move_to_end(numbers)
            return self._arrays[numbers]
        if len(self._arrays) >= self._most:
            _, oldest = self._arrays.popitem(last=False)
            del self._numbers[id(oldest)]
        array = self._arrays[numbers] = mx.array(numbers)
        self._numbers[id(array)] = numbers
        return array

    def numbers_of(self, array: mx.array) -> tuple[int, ...] | None:
        """The numbers in an array, without a wait for the device; None if it was not made here."""
        return self._numbers.get(id(array))

    def clear(self) -> None:
        self._arrays.clear()
        self._numbers.clear()


on_device = SharedNumbers(64)
