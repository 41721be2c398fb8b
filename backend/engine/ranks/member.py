"""What the code that runs on every rank during a load needs to know about the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backend.engine.ranks.place import Place

Value = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """agree: sends a value (JSON) to all ranks, waits for theirs, and returns the values of all,
    by rank. It raises an EngineError if the load has failed on another rank. All ranks call it
    at the same points of a load, and between them the same collectives of MLX.
    """

    place: Place
    agree: Callable[[Value], Sequence[Value]]
