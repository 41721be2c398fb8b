"""What sequences, prefill passes and entries cost: the bytes that the planner counts with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backend.engine.planning.guess_width import MOST_AGAIN
from backend.engine.planning.plan import Limits
from backend.engine.planning.sequence_state import SequenceState
from backend.engine.planning.sequence_table import SequenceTable


class Charges:
    """The bytes of one loaded model."""

    def __init__(self, limits: Limits) -> None:
        self._cost, self._draft = limits.cost, limits.draft
        self._passes, self._trims = limits.passes, limits.trims

    def used(self, sequences: SequenceTable) -> int:
        """Bytes that the admitted sequences are charged for."""
        admitted = sequences.admitted.values()
        used = sum(map(self.rectangle, (*sequences.groups(), *sequences.batches().values())))
        used += sum(one.arrived.beside for one in admitted)
        return used + self.snapshots(admitted) + self.least_pass(sequences)

    def newcomer(self, one: SequenceState, *, alone: bool) -> int:
        """Bytes for one more sequence: its own, its smallest pass, and, unless it would be alone,
        a copy while it joins a batch."""
        copied = 0 if alone else self._cost.of(one.total)
        own = one.width * self.row(one.charged) + one.arrived.beside
        return own + copied + self.smallest_pass(one)

    def row(self, tokens: int) -> int:
        """Bytes of a row of so many tokens: its KV, also a draft model's, and what a decode step
        computes with for it."""
        draft = self._draft.of(tokens) if self._draft else 0
        return self._cost.of(tokens) + draft + self._passes.chosen(1, tokens)

    def rectangle(self, members: Collection[SequenceState]) -> int:
        """Bytes of sequences whose KV lies side by side: each takes as much as the longest."""
        return sum(one.width for one in members) * self.row(max(one.charged for one in members))

    def snapshots(self, admitted: Collection[SequenceState]) -> int:
        """Bytes of the snapshots that these sequences have, or are to get."""
        if self._trims:
            return 0
        return sum(
            (len(one.snapshots) + one.wanted_snapshots) * self._cost.snapshot(one.prompt)
            for one in admitted
        )

    def entry(self, one: SequenceState, filled: int) -> int:
        """Bytes of an entry of a sequence's first `filled` tokens, with its snapshots."""
        return self._cost.of(filled) + len(one.snapshots) * self._cost.snapshot(one.prompt)

    # Passes.

    def least_pass(self, sequences: SequenceTable) -> int:
        """Bytes that every sequence in prefill needs to get on, one after the other."""
        return max(map(self.smallest_pass, sequences.of("prefill")), default=0)

    def smallest_pass(self, one: SequenceState) -> int:
        tokens = max(min(one.least, one.target - one.filled), one.fewest)
        return self.prefill_pass(one, tokens, one.charged if one.arrived.scores else one.total)

    def prefill_pass(self, one: SequenceState, tokens: int, seen: int, rows: int = 1) -> int:
        """Bytes of a pass of rows like this one, over so many tokens of each.

        An image or a sound is encoded in a pass of its own, which a pass that needs it waits for.
        """
        nbytes = self._passes.of(rows * tokens, seen)
        if one.arrived.scores or one.arrived.fresh:
            nbytes += rows * tokens * self._passes.per_choice
        reads = any(one.filled < stop for _, stop in one.arrived.spans)
        return max(nbytes, one.arrived.encodes if reads else 0)

    def shared_pass(self, members: Sequence[SequenceState], tokens: int, seen: int) -> int:
        """Bytes of a pass, and of the padding that it brings to the KV of those that share it."""
        padding = self.rectangle(members) - sum(self.rectangle([one]) for one in members)
        return self.prefill_pass(members[0], tokens, seen, len(members)) + padding

    def guesses(self, rows: int, width: int, longest: int) -> int:
        """Bytes of a step that checks so many guesses of each row, beside those of a plain one.

        Where a row has a recurrent state, the one from before the step is kept, both may be mixed
        into a third, and tokens are fed again.
        """
        state = self._cost.fixed
        fed = width + (MOST_AGAIN if state else 0)
        return self._passes.chosen(rows * fed, longest) + 2 * rows * state

    def fitting(self, one: SequenceState, tokens: int, left: int) -> int:
        """How many of the tokens a pass may take that computes with so many bytes; 0: none."""
        seen = one.charged if one.arrived.scores else min(one.filled + tokens, one.target)
        least = one.fewest
        if self.prefill_pass(one, least, seen) > left:
            return 0
        tokens = max(tokens, least)
        while self.prefill_pass(one, tokens, seen) > left:
            tokens = max(tokens // 2, least)
        return tokens
