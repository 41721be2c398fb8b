"""Joins MLX's group of ranks, and broadcasts in it. All functions run on the engine thread."""

from __future__ import annotations

import signal
from functools import cache

import mlx.core as mx

from backend.engine.errors import EngineFailed
from backend.engine.ranks.rank_info import RankInfo

# The process ends this many seconds before `RankInfo.timeout`, which is by default also how long
# hosts wait for Health.
_SOONER = 2.0


def join_group(info: RankInfo) -> None:
    """Join MLX's group of ranks. All ranks must do so at the same time. Raises EngineFailed.

    MLX can form only one group per process, and does not release the GIL until the group is
    complete. If that takes too long, a timer of the system ends the process by SIGALRM.
    """
    signal.setitimer(signal.ITIMER_REAL, max(info.timeout - _SOONER, 1.0))
    try:
        joined = mx.distributed.init(strict=True, backend=info.transport)
    except Exception as fault:
        raise EngineFailed(f"MLX cannot form the {info.transport} group: {fault}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if (joined.rank(), joined.size()) != (info.rank, info.size):
        raise EngineFailed(
            f"MLX says that this is rank {joined.rank()} of {joined.size()}, but it was started as"
            f" rank {info.rank} of {info.size}"
        )


@cache
def group() -> mx.distributed.Group:
    """Return the group that this process has joined.

    Every call returns the same object, because MLX caches functions for only 128 group objects.
    """
    return mx.distributed.init()


def broadcast(tokens: mx.array) -> mx.array:
    """Return the tokens that rank 0 has sampled, on every rank. This is part of MLX's graph.

    The result is a sum of all ranks' tokens, to which the other ranks contribute zeros. So rank 0
    waits for them too.

    tokens: integers of the same shape on every rank.
    """
    ranks = group()
    return mx.distributed.all_sum(tokens if ranks.rank() == 0 else tokens * 0, group=ranks)
