"""The planner's data about cached prefixes: stored, being stored, and evicted."""

from __future__ import annotations

from collections.abc import Collection

from backend.engine.planning.charges import Charges
from backend.engine.planning.plan import Limits, Source, Stored
from backend.engine.planning.prefix_index import PrefixIndex
from backend.engine.planning.sequence_state import SequenceState
from backend.engine.planning.sequence_table import SequenceTable


class StoredEntries:
    """The cached prefixes of one loaded model, which are called entries.

    index: finds the entry for a prompt.
    storing: entries that will exist after the next step, by number: each with its sequence, and how
        many of the sequence's tokens it has.
    copied: entries that the current plan copies, and which therefore cannot be evicted.
    unstored: how often KV was larger than the whole prompt cache.
    """

    def __init__(self, limits: Limits, charges: Charges, sequences: SequenceTable) -> None:
        self._limits, self._charges, self._sequences = limits, charges, sequences
        self.index = PrefixIndex(limits.prompt_cache, limits.max_entries)
        self.storing: dict[int, tuple[SequenceState, int]] = {}
        self.copied: set[int] = set()
        self.unstored = 0
        self._evicted: list[int] = []  # since the latest plan
        self._entries = 0

    @property
    def busy(self) -> bool:
        """Whether the next step must report something to the executor."""
        return bool(self.storing or self._evicted)

    @property
    def storing_bytes(self) -> int:
        """Bytes of entries being stored.

        No sequence is preempted for them, because entries are evicted first.
        """
        return sum(
            self._charges.entry(sequence, filled) for sequence, filled in self.storing.values()
        )

    @property
    def copied_bytes(self) -> int:
        return sum(map(self.index.size, self.copied))

    def number_for(self, sequence: SequenceState, filled: int) -> int | None:
        """Return a number for an entry with a sequence's first `filled` tokens.

        Returns None if the entry is not worth storing.
        """
        if not self._limits.prompt_cache:
            return None
        if self._limits.cost.of(filled) > self._limits.prompt_cache:
            self.unstored += 1
            return None
        if filled <= sequence.prompt:
            key = sequence.arrived.key.prefix(filled)
            known = self.index.covers(key, trimmable=self._limits.trims)
            if known is not None:
                self.index.touch(known)
                return None
        self._entries += 1
        self.storing[self._entries] = (sequence, filled)
        return self._entries

    def stored(self, event: Stored) -> None:
        sequence, _ = self.storing.pop(event.entry)
        key = sequence.arrived.key
        key = key.prefix(event.length) if event.length <= len(key) else key.extended(event.after)
        if event.nbytes > self._limits.prompt_cache:
            self.unstored += 1
            self._evicted.append(event.entry)
            return
        self._evict(self.index.add(event.entry, key, event.nbytes, positions=event.positions))
        for other in self._sequences.of("waiting"):
            if other.match is not None and other.arrived.key.shared(key) > other.match.length:
                other.match = None

    def serve(self, source: Source) -> None:
        """Use an entry for a sequence: remove it from the index, or mark it as copied."""
        if source.move:
            self.copied.discard(source.number)
            self.index.remove(source.number)
            self._unmatch((source.number,))
        else:
            self.copied.add(source.number)
            self.index.touch(source.number)

    def shrink(self, budget: int, *pinned: int) -> None:
        """Evict entries until they use at most `budget` bytes.

        pinned: entries that must stay.
        """
        most = max(min(budget, self._limits.prompt_cache), 0)
        if self.index.nbytes > most:
            self._evict(self.index.shrink(most, {*pinned, *self.copied}))

    def clear(self) -> None:
        self._evict(self.index.clear())

    def take_evicted(self) -> tuple[int, ...]:
        """Return the entries evicted since the latest call."""
        evicted, self._evicted = self._evicted, []
        return tuple(evicted)

    def _evict(self, entries: Collection[int]) -> None:
        self._evicted += entries
        self._unmatch(entries)

    def _unmatch(self, entries: Collection[int]) -> None:
        """Search again for the prompts for which these entries were the best match."""
        gone = set(entries)
        for sequence in self._sequences.of("waiting") if gone else ():
            if sequence.match is not None and sequence.match.entry in gone:
                sequence.match = None
