"""Joins and uses MLX's group of ranks. All functions run on the engine thread."""

from __future__ import annotations

import signal
from functools import cache

import mlx.core as mx

from backend.engine.errors import EngineFailed
from backend.engine.ranks.place import Place

_SOONER = 2.0  # seconds before the time-out, which is also how long hosts wait for Health


def join_group(place: Place) -> None:
    """Join MLX's group of ranks. All ranks must do so at the same time. Raises EngineFailed.

    MLX can form only one group per process, and keeps the interpreter's lock until the group is
    complete. So if that takes too long, a signal of the system ends the process.
    """
    signal.setitimer(signal.ITIMER_REAL, max(place.timeout - _SOONER, 1.0))
    try:
        joined = mx.distributed.init(strict=True, backend=place.transport)
    except Exception as fault:
        raise EngineFailed(f"MLX cannot form the {place.transport} group: {fault}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if (joined.rank(), joined.size()) != (place.rank, place.size):
        raise EngineFailed(
            f"MLX says that this is rank {joined.rank()} of {joined.size()}, but it was started as"
            f" rank {place.rank} of {place.size}"
        )


@cache
def group() -> mx.distributed.Group:
    """Return the group that this process has joined.

    Every call returns the same object, because MLX caches functions for only 128 group objects.
    """
    return mx.distributed.init()


def broadcast(tokens: mx.array) -> mx.array:
    """Broadcast the tokens that rank 0 sampled, as part of the graph.

    Rank 0 also waits until the other ranks have computed their tokens, but does not use them.

    tokens: integers of the same shape on every rank.
    """
    ranks = group()
    return mx.distributed.all_sum(tokens if ranks.rank() == 0 else tokens * 0, group=ranks)
