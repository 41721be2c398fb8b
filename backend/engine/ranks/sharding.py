"""Joins MLX's group of ranks, and divides a model among the ranks, by methods of mlx-lm's models.

With tensor parallelism (`shard`), every rank has a part of each layer, and the ranks add up their
results twice per layer. With pipeline parallelism (`pipeline`), every rank has some of the layers,
and sends its results to the next rank once per pass; rank 0 has the last layers.

All functions run on the engine thread.
"""

from __future__ import annotations

import inspect
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from backend.engine.errors import EngineFailed, ModelRejected
from backend.engine.ranks.rank_info import Parallelism, RankInfo

# The process ends this many seconds before `RankInfo.timeout`, which is by default also how long
# hosts wait for Health.
_SOONER = 2.0
_UNEVEN = 0.9  # if the least memory is at least this share of the most, layers are divided evenly
_FAST = ("jaccl", "nccl")  # transports with a latency low enough for tensor parallelism


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


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a model, and the words for it in messages, as in `layers 0-11 of 24`."""

    way: Parallelism
    words: str


def parallelism_of(model: Any, name: str, requested: str, info: RankInfo) -> Parallelism:
    """Return how to divide a model. Raises ModelRejected."""
    ways: list[Parallelism] = ["tensor"] if hasattr(model, "shard") else []
    if _has_pipeline(model):
        ways.append("pipeline")
    if not ways:
        raise ModelRejected.because(
            name,
            f"mlx-lm cannot divide a model of type {model.model_type} among ranks: serve it"
            " with one rank",
        )
    if requested != "auto" and requested not in ways:
        raise ModelRejected.because(
            name,
            f"mlx-lm offers only {ways[0]} parallelism for a model of type {model.model_type}:"
            f" set the option parallelism:{ways[0]}",
        )
    if requested in ways:
        return "tensor" if requested == "tensor" else "pipeline"
    return ways[0] if info.transport in _FAST else ways[-1]


def split_of(layers: int, memories: Sequence[int]) -> list[int]:
    """Return how many layers each rank gets: at least one, in proportion to its memory.

    Amounts of memory that differ by less than a tenth count as equal, because each was measured
    only once.
    """
    if max(memories) * _UNEVEN <= min(memories):
        memories = [1] * len(memories)
    spare = layers - len(memories)
    shares = [spare * memory / sum(memories) for memory in memories]
    split = [1 + int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda rank: int(shares[rank]) - shares[rank])
    for rank in by_rest[: layers - sum(split)]:
        split[rank] += 1
    return split


def keep_layers(model: Any, name: str, info: RankInfo, memories: Sequence[int]) -> Shard:
    """Remove the layers of other ranks from a model with lazy weights. Raises ModelRejected."""
    layers = len(model.layers)
    if layers < info.size:
        raise ModelRejected.because(
            name,
            f"it has {layers} layers, too few for a pipeline of {info.size} ranks: use fewer ranks",
        )
    inner = model.model
    if "split" in inspect.signature(inner.pipeline).parameters:
        inner.pipeline(group(), split=split_of(layers, memories))
    else:
        inner.pipeline(group())
    return Shard("pipeline", f"layers {inner.start_idx}-{inner.end_idx - 1} of {layers}")


def keep_heads(model: Any, name: str, config: Mapping[str, Any], info: RankInfo) -> Shard:
    """Remove the parts of other ranks from each layer of a model with lazy weights.

    Raises ModelRejected.
    """
    part = config.get("text_config")
    part = part if isinstance(part, dict) else config
    for key in ("num_attention_heads", "num_key_value_heads"):
        count = part.get(key)
        if isinstance(count, int) and count % info.size:
            other = ", or set the option parallelism:pipeline" if _has_pipeline(model) else ""
            raise ModelRejected.because(
                name,
                f"its {key} ({count}) cannot be divided by {info.size} ranks: use another number"
                f" of ranks{other}",
            )
    try:
        model.shard(group())
    except (ValueError, AssertionError) as fault:
        reason = re.sub(r"\s+", " ", str(fault)) or type(fault).__name__
        raise ModelRejected.because(
            name, f"it cannot be divided by {info.size} ranks: {reason}"
        ) from None
    return Shard("tensor", f"part {info.rank + 1} of {info.size} of every layer")


def _has_pipeline(model: Any) -> bool:
    return hasattr(getattr(model, "model", None), "pipeline")
