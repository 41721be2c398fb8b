"""The common prefix of two sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
