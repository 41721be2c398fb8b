"""This process's membership in MLX's group of ranks. Called on the engine thread only."""

from __future__ import annotations

import mlx.core as mx

from backend.engine.errors import EngineFailed
from backend.engine.ranks.place import Place


def join_group(place: Place) -> None:
    """Join MLX's group of ranks; all ranks must call this at the same time.

    mlx 0.32.4 can form one group per process, and holds the interpreter's lock until it is
    complete. Raises EngineFailed.
    """
    try:
        group = mx.distributed.init(strict=True, backend=place.transport)
    except Exception as fault:
        raise EngineFailed(f"MLX cannot form the {place.transport} group: {fault}") from None
    if (group.rank(), group.size()) != (place.rank, place.size):
        raise EngineFailed(
            f"MLX says that this is rank {group.rank()} of {group.size()}, but it was started as"
            f" rank {place.rank} of {place.size}"
        )


def spread(tokens: mx.array) -> mx.array:
    """Broadcast the tokens that rank 0 sampled, as part of the graph.

    tokens: integers of the same shape on every rank. The values of other ranks do not affect the
    result; rank 0 only waits until they have been computed.
    """
    group = mx.distributed.init()
    return mx.distributed.all_sum(tokens if group.rank() == 0 else tokens * 0, group=group)
