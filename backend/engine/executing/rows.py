"""Sequences whose KV is in the same arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from backend.engine.caching import kv

if TYPE_CHECKING:
    from backend.engine.executing.executor_sequence import ExecutorSequence


class Rows:
    """Sequences whose KV is in the rows of one cache, in the same order."""

    def __init__(self, cache: kv.BatchCache, sequences: Sequence[ExecutorSequence]) -> None:
        self.cache = cache
        self.sequences = list(sequences)

    @classmethod
    def gathered(cls, sequences: Sequence[ExecutorSequence]) -> Rows:
        """Return rows of exactly these sequences, which leave their present rows.

        Raises what MLX raises.
        """
        homes = [sequence.rows for sequence in sequences if sequence.rows is not None]
        if len(homes[0].sequences) == len(sequences) == homes.count(homes[0]):
            return homes[0]
        gathered = cls(kv.BatchCache(), sequences)
        members = [
            home.cache.member(home.sequences.index(sequence))
            for sequence, home in zip(sequences, homes, strict=True)
        ]
        if len(sequences) == 1:
            members = [(homes[0].extract(sequences[0]), 0)]
        gathered.cache.join(members)
        del members  # the source arrays, which are freed as they are copied
        for sequence, home in zip(sequences, homes, strict=True):
            home.leave([sequence])
            sequence.rows = gathered
        start_copies([gathered, *{id(home): home for home in homes if home.sequences}.values()])
        return gathered

    def extract(self, sequence: ExecutorSequence) -> kv.RowCache:
        """Return a copy of a sequence's KV, of the tokens in `history`, not yet started."""
        return self.cache.extract(self.sequences.index(sequence), start=False)

    def take(self, sequence: ExecutorSequence) -> kv.RowCache:
        """Return the KV of a sequence that will leave, in buffers no larger than needed."""
        return self.extract(sequence)

    def settle(self) -> None:
        """Copy the sequences that remain after others have left, to free the larger arrays."""
        self.cache.settle()

    def leave(self, leaving: Sequence[ExecutorSequence]) -> None:
        gone = set(map(id, leaving))
        self.cache.leave([at for at, sequence in enumerate(self.sequences) if id(sequence) in gone])
        self.sequences = [sequence for sequence in self.sequences if id(sequence) not in gone]


def start_copies(changed: Sequence[Rows], copies: Sequence[kv.RowCache] = ()) -> None:
    """Settle rows and start to compute those that were copied. Raises what MLX raises.

    copies: other copies of the same KV.
    """
    for rows in changed:
        rows.settle()
    caches = [rows.cache for rows in changed if rows.cache.copied]
    kv.start_copies([*(cache.layers for cache in caches), *copies])
    for cache in caches:
        cache.copied = False
