"""Provides what rank 0 needs to load a model that is divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backend.engine.ranks.leader import Leader
from backend.engine.ranks.member import Member, Value
from backend.engine.ranks.wire import Plain

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load of a divided model on rank 0.

    leader: the connections to the other ranks.
    member: exchanges values with the other ranks.
    """

    leader: Leader
    member: Member

    def division(self, shards: Sequence[Value]) -> str:
        """Describe how the model is divided.

        For example `2 ranks, pipeline: rank 0 (10.0.0.1) has layers 12-23 of 24, …`.

        shards: the description of each rank's part, by rank.
        """
        parts = [
            f"{self.member.info.name(rank)} has {shard['words']}"
            for rank, shard in enumerate(shards)
        ]
        return f"{len(shards)} ranks, {shards[0]['way']}: {', '.join(parts)}"

    def plain(
        self, run: Callable[[Sequence[int], Any, int], mx.array]
    ) -> Callable[[Sequence[int], Any, int], mx.array]:
        """Return a function that runs the reference forward pass on all ranks.

        run: runs the reference forward pass on this rank.
        """

        def everywhere(tokens: Sequence[int], item: Any, prompt: int) -> mx.array:
            import mlx.core as mx

            self.leader.send(Plain(tuple(tokens)))
            logits = run(tokens, item, prompt)
            mx.eval(logits)
            return logits

        return everywhere
