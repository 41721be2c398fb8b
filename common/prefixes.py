"""Compares and searches sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    if isinstance(left, str) and isinstance(right, str):  # slices are compared much faster
        places = range(min(len(left), len(right)))
        return bisect_left(places, True, key=lambda at: left[: at + 1] != right[: at + 1])
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def position_of(wanted: Sequence[Any], sequence: Sequence[Any], start: int = 0) -> int:
    """Return where `wanted` first occurs in a sequence of the same type; -1 if it does not.

    wanted: at least one item.
    start: the first position to consider.
    """
    with suppress(ValueError):
        while True:
            start = sequence.index(wanted[0], start)
            if sequence[start : start + len(wanted)] == wanted:
                return start
            start += 1
    return -1
