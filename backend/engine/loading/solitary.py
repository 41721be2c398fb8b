"""Families that answer wrongly in a batch, but only at lengths too long for the trial."""

from __future__ import annotations

from collections.abc import Mapping

_BLOCKS = "its attention cuts blocks of the batch's padded KV, so a row would see other blocks"
_WHY: Mapping[str, str] = {"minimax_m3": _BLOCKS, "minimax_m3_vl": _BLOCKS}


def why_alone(model_type: str) -> str:
    """Why requests of a model type must be served one at a time; '' if they need not be."""
    return _WHY.get(model_type, "")
