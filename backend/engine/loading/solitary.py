"""Families that are wrong in a batch only at lengths that no trial at load can afford."""

from __future__ import annotations

from collections.abc import Mapping

_BLOCKS = "its attention cuts blocks of the batch's padded KV, so a row would see other blocks"
_WHY: Mapping[str, str] = {"minimax_m3": _BLOCKS, "minimax_m3_vl": _BLOCKS}


def why_alone(model_type: str) -> str:
    """Why requests of a model are served one at a time; '' where they need not be."""
    return _WHY.get(model_type, "")
