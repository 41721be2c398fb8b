"""What two sequences have in common at their beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many items they have in common before the first that differs."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
