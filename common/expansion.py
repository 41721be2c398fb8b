"""Counts the values of a tree in which parts may occur several times, such as YAML with aliases."""

from __future__ import annotations

import math
from typing import Any


def expanded_count(value: Any, attribute: str) -> float:
    """Return the number of values, with a shared part counted at each occurrence.

    Each distinct part is visited only once. Returns inf if a part contains itself. Raises
    RecursionError.

    attribute: the attribute that has the list of an object's parts; a part may be a tuple.
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
