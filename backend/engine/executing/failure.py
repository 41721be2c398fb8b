"""A failed action of the executor, and the sequences that it affects."""

from __future__ import annotations

from dataclasses import dataclass

GRAMMAR = "grammar"  # an error of a grammar, which leaves the KV intact


@dataclass(frozen=True, slots=True)
class Failure:
    """An action that failed.

    sequences: numbers of the sequences that lost their KV.
    where: name of the action, for the log.
    fault: the exception.
    """

    sequences: tuple[int, ...]
    where: str
    fault: Exception
