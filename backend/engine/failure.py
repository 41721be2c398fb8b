"""An action of the executor's that failed, and whom it cost what."""

from __future__ import annotations

from dataclasses import dataclass

GRAMMAR = "grammar"  # where a fault is that leaves the KV whole


@dataclass(frozen=True, slots=True)
class Failure:
    """An action that failed, and the sequences that lost their KV with it."""

    sequences: tuple[int, ...]
    where: str
    fault: Exception
