"""Sequences whose KV is in the same arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from backend.engine.caching import kv

if TYPE_CHECKING:
    from backend.engine.executing.executor_sequence import ExecutorSequence


class Rows:
    """Sequences in the order of their KV, which are prefilled together unless they decode."""

    def __init__(self, cache: kv.BatchCache, sequences: Sequence[ExecutorSequence]) -> None:
        self.cache = cache
        self.sequences = list(sequences)

    @classmethod
    def gathered(cls, sequences: Sequence[ExecutorSequence]) -> Rows:
        """Rows of exactly these sequences, which leave their present rows.

        Raises what MLX raises; the present rows are then unchanged.
        """
        homes = [one.rows for one in sequences if one.rows is not None]
        if len(homes[0].sequences) == len(sequences) == homes.count(homes[0]):
            return homes[0]
        gathered = cls(kv.BatchCache(), sequences)
        members = [
            home.cache.member(home.sequences.index(one))
            for one, home in zip(sequences, homes, strict=True)
        ]
        if len(sequences) == 1:
            members = [(homes[0].extract(sequences[0]), 0)]
        gathered.cache.join(members)
        for one, home in zip(sequences, homes, strict=True):
            home.leave([one])
            one.rows = gathered
        return gathered

    def extract(self, one: ExecutorSequence) -> kv.RowCache:
        """A copy of the KV of a sequence, in buffers of its own; `history` has its tokens."""
        return self.cache.extract(self.sequences.index(one))

    def take(self, one: ExecutorSequence) -> kv.RowCache:
        """The KV of a sequence that will leave, in buffers that are no larger than needed."""
        return self.extract(one)

    def settle(self) -> None:
        """Copy the remaining sequences after a leave, so that the larger arrays are freed."""
        if not self.cache.settled:
            mx.async_eval([layer.state for layer in self.cache.layers])

    def leave(self, leaving: Sequence[ExecutorSequence]) -> None:
        gone = set(map(id, leaving))
        self.cache.leave([at for at, one in enumerate(self.sequences) if id(one) in gone])
        self.sequences = [one for one in self.sequences if id(one) not in gone]
