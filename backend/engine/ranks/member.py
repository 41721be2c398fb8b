"""Defines how code that runs on every rank during a load exchanges values with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backend.engine.ranks.rank_info import RankInfo

Value = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """This process as one of the ranks that load a model.

    agree: sends a value (JSON) to all ranks, waits for their values, and returns all values by
        rank. Raises an EngineError if the load has failed on another rank. All ranks call `agree`
        at the same points of a load, with the same MLX collectives in between.
    """

    info: RankInfo
    agree: Callable[[Value], Sequence[Value]]
