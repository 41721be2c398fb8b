"""A failed action of the executor, and the sequences that it affects."""

from __future__ import annotations

from dataclasses import dataclass

GRAMMAR = "grammar"  # an error of a grammar, which leaves the KV intact


@dataclass(frozen=True, slots=True)
class Failure:
    """An action that failed, and the sequences that lost their KV with it."""

    sequences: tuple[int, ...]
    where: str
    fault: Exception
