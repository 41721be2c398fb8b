"""What code that runs on every rank during a load needs to know about the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backend.engine.ranks.place import Place

Value = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """This process as one of the ranks that load a model.

    agree: sends a value (JSON) to all ranks, waits for theirs, and returns all values by rank. It
    raises an EngineError if the load has failed on another rank. All ranks call it at the same
    points of a load, with the same MLX collectives in between.
    """

    place: Place
    agree: Callable[[Value], Sequence[Value]]
