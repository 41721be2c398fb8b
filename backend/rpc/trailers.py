"""Trailing metadata of Predict, PredictStream and Status, for what the protocol has no field for.

A host needs to know why an answer ended, how many prompt tokens came from the cache, and how many
answer tokens were reasoning. Only successful calls have these trailers, and hosts may ignore them.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.events import Finished

FINISH_REASON = "mlx-finish-reason"
CACHED_TOKENS = "mlx-cached-tokens"
REASONING_TOKENS = "mlx-reasoning-tokens"
STOP_SEQUENCE = "mlx-stop-sequence-bin"
ENDED_BY = "mlx-ended-by"
RANK = "mlx-rank"  # of Status: a line for each rank


def of(end: Finished, reasoning_tokens: int) -> tuple[tuple[str, str | bytes], ...]:
    """The trailers for this end of an answer."""
    trailers: list[tuple[str, str | bytes]] = [
        (FINISH_REASON, end.reason),
        (CACHED_TOKENS, str(end.usage.cached_tokens)),
        (REASONING_TOKENS, str(reasoning_tokens)),
    ]
    if end.stop_sequence:
        trailers.append((STOP_SEQUENCE, end.stop_sequence.encode()))
    if end.repeated:
        trailers.append((ENDED_BY, "repetition"))
    return tuple(trailers)


def of_ranks(lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((RANK, line.encode("ascii", "replace").decode()) for line in lines)
