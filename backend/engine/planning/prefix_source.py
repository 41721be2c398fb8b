"""Chooses the KV with which a sequence starts: of a cached prefix, another sequence, or a file."""

from __future__ import annotations

from collections.abc import Collection

from backend.engine.planning.checkpoint_positions import LEAST_STORED
from backend.engine.planning.pace import Pace
from backend.engine.planning.plan import Limits, Source
from backend.engine.planning.prefix_index import Match
from backend.engine.planning.sequence_state import SequenceState, SequenceTable
from backend.engine.planning.stored_entries import StoredEntries


class PrefixSource:
    """Finds the longest prefix of a prompt whose KV exists or is being computed."""

    def __init__(
        self, limits: Limits, sequences: SequenceTable, entries: StoredEntries, pace: Pace
    ) -> None:
        self._limits, self._sequences, self._entries = limits, sequences, entries
        self._pace = pace

    def match(self, sequence: SequenceState) -> Match:
        """Return the best cached prefix for a prompt.

        `SequenceState.match` stores the result until a change of the cached prefixes may concern
        it.
        """
        if sequence.match is None:
            sequence.match = self._entries.index.find(sequence.arrived.key)
        return sequence.match

    def choose(self, sequence: SequenceState) -> Source | None:
        """Return the source of the longest prefix whose KV exists; None if there is none."""
        if sequence.arrived.fresh or not (self._limits.prompt_cache or sequence.on_disk):
            return None
        index = self._entries.index
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
            for other, filled in self._entries.storing.values()
        )

    def positions_of(self, source: Source | None) -> Collection[int] | None:
        """Return the lengths at which a source has snapshots; None if it can be truncated."""
        if source is None or source.kind == "disk":
            return ()
        if source.kind == "sequence":
            return self._sequences.by_number[source.number].snapshots
        return self._entries.index[source.number].positions

    def _only_user(self, sequence: SequenceState, entry: int) -> bool:
        """Return whether the KV of a cached prefix may be moved to the only sequence that needs it.

        When the sequence ends, its own longer KV becomes a cached prefix instead.
        """
        if not sequence.arrived.keep or self._entries.index[entry].positions is not None:
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
