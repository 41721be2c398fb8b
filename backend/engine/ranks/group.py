"""This process's membership in MLX's group of ranks. Called on the engine thread only."""

from __future__ import annotations

import signal
from functools import cache

import mlx.core as mx

from backend.engine.errors import EngineFailed
from backend.engine.ranks.place import Place

_SOONER = 2.0  # seconds before the time-out: a host waits as long for an answer to Health


def join_group(place: Place) -> None:
    """Join MLX's group of ranks; all ranks must call this at the same time.

    MLX can form one group per process, and holds the interpreter's lock until it is complete. So if
    that takes too long, a signal of the system ends the process. Raises EngineFailed.
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

    The same object at every call: MLX caches functions by group, and keeps those of the latest 128.
    """
    return mx.distributed.init()


def broadcast(tokens: mx.array) -> mx.array:
    """Broadcast the tokens that rank 0 sampled, as part of the graph.

    tokens: integers of the same shape on every rank. The values of other ranks do not affect the
    result; rank 0 only waits until they have been computed.
    """
    ranks = group()
    return mx.distributed.all_sum(tokens if ranks.rank() == 0 else tokens * 0, group=ranks)
