"""What the wire has no field for, in the trailing metadata of a Predict or PredictStream.

A host has to know why an answer ended, how much of its prompt was remembered, and how much of the
answer was reasoning. Only a call that ends well has these trailers; hosts that do not look for them
never see them.
"""

from __future__ import annotations

from backend.engine.events import Finished

FINISH_REASON = "mlx-finish-reason"
CACHED_TOKENS = "mlx-cached-tokens"
REASONING_TOKENS = "mlx-reasoning-tokens"
STOP_SEQUENCE = "mlx-stop-sequence-bin"
ENDED_BY = "mlx-ended-by"


def of(end: Finished, reasoning_tokens: int) -> tuple[tuple[str, str | bytes], ...]:
    """The trailers of an answer that came to this end."""
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
