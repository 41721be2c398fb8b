"""Counts the values in a tree whose parts may be shared, as aliases of YAML allow."""

from __future__ import annotations

import math
from typing import Any


def expanded_count(value: Any, attribute: str) -> float:
    """Return the number of values, shared ones counted each time; inf if a value contains itself.

    This takes time for each distinct value only. Raises RecursionError.

    attribute: the attribute in which an object has its list of parts; parts may be tuples.
    """
    known: dict[int, float] = {}

    def count(node: Any) -> float:
        if id(node) not in known:
            known[id(node)] = math.inf
            parts = node if isinstance(node, list | tuple) else getattr(node, attribute, ())
            inner = parts if isinstance(parts, list | tuple) else ()
            known[id(node)] = 1 + sum(map(count, inner))
        return known[id(node)]

    return count(value)
