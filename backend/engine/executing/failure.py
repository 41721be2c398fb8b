"""A failed action of the executor, and the sequences that it affects."""

from __future__ import annotations

from dataclasses import dataclass

GRAMMAR = "grammar"  # where a fault is that leaves the KV whole


@dataclass(frozen=True, slots=True)
class Failure:
    """An action that failed, and the sequences that lost their KV with it."""

    sequences: tuple[int, ...]
    where: str
    fault: Exception
