"""Records the cached prefixes, and chooses the KV with which a sequence starts.

That is the KV of a cached prefix, of another sequence, or of a file.
"""

from __future__ import annotations

from collections.abc import Collection

from backend.engine.planning.charges import Charges
from backend.engine.planning.checkpoint_positions import LEAST_STORED
from backend.engine.planning.pace import Pace
from backend.engine.planning.plan import Limits, Source, Stored
from backend.engine.planning.prefix_index import Match, PrefixIndex
from backend.engine.planning.sequence_state import SequenceState, SequenceTable


class StoredEntries:
    """The cached prefixes of one loaded model, which are called entries in code.

    storing: entries that will be stored after the next step, by number. Each has the sequence whose
        KV it stores, and the number of tokens.
    copied: numbers of entries that the current plan copies, and that must not be evicted.
    unstored: how often KV was not stored because it was larger than the whole prompt cache.
    """

    def __init__(
        self, limits: Limits, charges: Charges, sequences: SequenceTable, pace: Pace
    ) -> None:
        self._limits, self._charges, self._sequences = limits, charges, sequences
        self._pace = pace
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

    def match(self, sequence: SequenceState) -> Match:
        """Return the best cached prefix for a prompt.

        `SequenceState.match` stores the result until a change of the cached prefixes may concern
        it.
        """
        if sequence.match is None:
            sequence.match = self.index.find(sequence.arrived.key)
        return sequence.match

    def choose(self, sequence: SequenceState) -> Source | None:
        """Return the source of the longest prefix whose KV exists; None if there is none."""
        if sequence.arrived.fresh or not (self._limits.prompt_cache or sequence.on_disk):
            return None
        index = self.index
        best: Source | None = None
        match = self.match(sequence)
        if match.entry is not None:
            length = sequence.uncut(match.length)
            if length == match.length or index[match.entry].positions is None:
                move = length == len(index[match.entry].key) and self._only_user(
                    sequence, match.entry
                )
                best = Source("entry", match.entry, length, move)
        for other in self._sequences.admitted.values() if self._limits.prompt_cache else ():
            length = self._served_by(sequence, other)
            if length > (best.length if best else 0):
                best = Source("sequence", other.number, length)
        if sequence.on_disk > (best.length if best else 0):
            best = Source("disk", 0, sequence.on_disk)
        return best if best is not None and best.length > 0 else None

    def expects(self, sequence: SequenceState, source: Source | None, free: int) -> bool:
        """Return whether a sequence should wait for a prefix that is being computed or stored.

        source: the best source that exists now.
        free: bytes for a snapshot of the prefix, if a snapshot is needed.
        """
        if sequence.arrived.fresh or sequence.generated or not self._limits.prompt_cache:
            return False
        for other in self._sequences.of("prefill"):
            length = min(_shared(sequence, other), other.target)
            if other.filled >= length or other.width > 1:
                continue
            same = (
                source is not None and source.kind == "sequence" and source.number == other.number
            )
            if length < self._pace.width + (0 if source is None or same else source.length):
                continue
            if not self._limits.trims and length not in other.positions:
                # The prompts may share tokens of an image that only `other` has.
                inside = other.uncut(length) < length
                if inside or self._limits.cost.snapshot(other.prompt) > free:
                    continue
                other.positions.add(length)
            return True
        known = source.length if source else 0
        # A cached prefix is stored after one more step, so even a few more tokens justify a wait.
        return any(
            self._truncatable(other, min(_shared(sequence, other), filled)) >= known + LEAST_STORED
            for other, filled in self.storing.values()
        )

    def positions_of(self, source: Source | None) -> Collection[int] | None:
        """Return the lengths at which a source has snapshots; None if it can be truncated."""
        if source is None or source.kind == "disk":
            return ()
        if source.kind == "sequence":
            return self._sequences.by_number[source.number].snapshots
        return self.index[source.number].positions

    def _only_user(self, sequence: SequenceState, entry: int) -> bool:
        """Return whether the KV of a cached prefix may be moved to the only sequence that needs it.

        When the sequence ends, its own longer KV becomes a cached prefix instead.
        """
        if self.index[entry].positions is not None:
            return False
        return not any(
            other is not sequence and self.match(other).entry == entry
            for other in self._sequences.of("waiting")
        )

    def _served_by(self, sequence: SequenceState, other: SequenceState) -> int:
        """Return how many tokens' KV can be copied from the running sequence `other`."""
        if other.width > 1:
            return 0
        filled = other.filled if other.state == "prefill" else other.prompt
        shared = self._truncatable(other, min(_shared(sequence, other), filled))
        return sequence.uncut(shared) if self._limits.trims else shared

    def _truncatable(self, other: SequenceState, shared: int) -> int:
        """Return the greatest length up to `shared` to which the KV of `other` can be truncated."""
        if self._limits.trims:
            return shared
        return max((length for length in other.snapshots if length <= shared), default=0)


def _shared(sequence: SequenceState, other: SequenceState) -> int:
    """Return the length of the common prefix of two prompts, as far as it can be reused.

    The prefix does not end inside an image or audio, nor contain the last token of `sequence`,
    whose pass computes the logits.
    """
    if other.number not in sequence.shared:
        length = min(sequence.arrived.key.shared(other.arrived.key), sequence.prompt - 1)
        sequence.shared[other.number] = sequence.uncut(length)
    return sequence.shared[other.number]
