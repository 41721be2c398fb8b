"""Divides a model among ranks, by methods of mlx-lm's models.

With tensor parallelism (`shard`), every rank has a part of each layer, and the ranks add up their
results twice per layer. With pipeline parallelism (`pipeline`), every rank has some of the layers,
and sends its results to the next rank once per pass; rank 0 has the last layers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.engine.errors import ModelRejected
from backend.engine.ranks.group import group
from backend.engine.ranks.rank_info import Parallelism, RankInfo

_UNEVEN = 0.9  # if the least memory is at least this share of the most, layers are divided evenly
_FAST = ("jaccl", "nccl")  # transports with a latency low enough for tensor parallelism


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a model, and the words for it in messages, as in `layers 0-11 of 24`."""

    way: Parallelism
    words: str


def parallelism_of(model: Any, name: str, requested: str, info: RankInfo) -> Parallelism:
    """Return how to divide a model.

    requested: `tensor`, `pipeline` or `auto`.

    Raises ModelRejected.
    """
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

    memories: bytes that each rank may use, by rank.
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
    """Remove the layers of other ranks from a model with lazy weights. Raises ModelRejected.

    memories: bytes that each rank may use, by rank.
    """
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
    for key, count in _must_divide(config):
        if count % info.size:
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


def _must_divide(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    part = config.get("text_config")
    part = part if isinstance(part, dict) else config
    counts = [(key, part.get(key)) for key in ("num_attention_heads", "num_key_value_heads")]
    return [(key, count) for key, count in counts if isinstance(count, int)]
