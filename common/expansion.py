"""Counts the values in a tree whose parts may be shared, as aliases of YAML allow."""

from __future__ import annotations

import math
from typing import Any


def expanded_count(value: Any, attribute: str) -> float:
    """The number of values, shared ones counted each time; inf if a value contains itself.

    attribute: where an object has its list of parts; parts may be tuples. Takes time for each
    distinct value only. Raises RecursionError.
    """
    known: dict[int, float] = {}

    def count(one: Any) -> float:
        if id(one) not in known:
            known[id(one)] = math.inf
            parts = one if isinstance(one, list | tuple) else getattr(one, attribute, ())
            inner = parts if isinstance(parts, list | tuple) else ()
            known[id(one)] = 1 + sum(map(count, inner))
        return known[id(one)]

    return count(value)
