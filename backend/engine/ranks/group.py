"""This process in MLX's own group of ranks. Called on the engine thread only."""

from __future__ import annotations

import mlx.core as mx

from backend.engine.errors import EngineFailed
from backend.engine.ranks.place import Place


def join_group(place: Place) -> None:
    """Connect with the other ranks, which must be about to do so too.

    mlx 0.32.4 has one group per process: it can be formed once, and holds the interpreter's lock
    meanwhile. Raises EngineFailed.
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
    """The tokens that rank 0 chose, on every rank, as part of the graph.

    tokens: integers of the same shape on every rank. Those of the other ranks only say when they
    have computed as far.
    """
    group = mx.distributed.init()
    return mx.distributed.all_sum(tokens if group.rank() == 0 else tokens * 0, group=group)
