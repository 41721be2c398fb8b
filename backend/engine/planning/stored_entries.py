"""Records which cached prefixes are stored, are being stored, or were evicted."""

from __future__ import annotations

from collections.abc import Collection

from backend.engine.planning.charges import Charges
from backend.engine.planning.plan import Limits, Source, Stored
from backend.engine.planning.prefix_index import PrefixIndex
from backend.engine.planning.sequence_state import SequenceState, SequenceTable


class StoredEntries:
    """The cached prefixes of one loaded model, which are called entries in code.

    storing: entries that will be stored after the next step, by number. Each has the sequence whose
        KV it stores, and the number of tokens.
    copied: numbers of entries that the current plan copies, and that must not be evicted.
    unstored: how often KV was not stored because it was larger than the whole prompt cache.
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
        """Whether the next step must store or drop an entry."""
        return bool(self.storing or self._evicted)

    @property
    def storing_bytes(self) -> int:
        """Bytes of entries that are being stored; no sequence is preempted for them."""
        return sum(
            self._charges.entry(sequence, filled) for sequence, filled in self.storing.values()
        )

    @property
    def copied_bytes(self) -> int:
        return sum(self.index[entry].nbytes for entry in self.copied)

    def number_for(self, sequence: SequenceState, filled: int) -> int | None:
        """Return the number of a new entry with a sequence's first `filled` tokens.

        Returns None if the KV is not worth storing, for example if `filled` is 0.
        """
        if not (filled and self._limits.prompt_cache):
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
        """Remove an entry from the index if its KV is moved; else mark it as copied and used."""
        if source.move:
            self.copied.discard(source.number)
            self.index.remove(source.number)
            self._unmatch((source.number,))
        else:
            self.copied.add(source.number)
            self.index.touch(source.number)

    def shrink(self, budget: int, *pinned: int) -> None:
        """Evict entries, except those `pinned`, until they use at most `budget` bytes."""
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
        """Forget these entries as matches of waiting prompts, which are then looked up again."""
        gone = set(entries)
        for sequence in self._sequences.of("waiting") if gone else ():
            if sequence.match is not None and sequence.match.entry in gone:
                sequence.match = None
