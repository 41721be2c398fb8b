"""The bytes that the planner charges for sequences, prefill passes and entries."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

from backend.engine.planning.guess_width import MOST_AGAIN
from backend.engine.planning.pace import SMALLEST_STEP
from backend.engine.planning.plan import GROWTH_STEP, CacheCost, Limits, PassCost
from backend.engine.planning.sequence_state import SequenceState
from backend.engine.planning.sequence_table import SequenceTable


def longest_alone(
    cost: CacheCost, passes: PassCost, draft: CacheCost | None, room: int, most: int
) -> int:
    """Return how many tokens, at most `most`, one sequence may have in `room` bytes.

    No other sequence runs then, and its prefill passes are as short as they may be.
    """
    window = max((size for _, size in cost.windowed), default=0)

    def needed(tokens: int) -> int:
        kv = cost.of(tokens) + (draft.of(tokens) if draft else 0)
        masked = min(tokens, window and window + SMALLEST_STEP)
        prefill = passes.of(SMALLEST_STEP, tokens, masked) + SMALLEST_STEP * passes.per_choice
        return kv + passes.chosen(1, tokens) + prefill

    return bisect_right(range(1, most + 1), room, key=needed)


class Charges:
    """The cost in bytes of everything that one loaded model runs and stores."""

    def __init__(self, limits: Limits) -> None:
        self._cost, self._draft = limits.cost, limits.draft
        self._passes, self._trims = limits.passes, limits.trims
        self._window = max((most for _, most in limits.cost.windowed), default=0)

    def used(self, sequences: SequenceTable) -> int:
        """Return the bytes that the admitted sequences are charged for."""
        admitted = sequences.admitted.values()
        used = sum(map(self.rectangle, (*sequences.groups(), *sequences.batches().values())))
        used += sum(sequence.arrived.beside for sequence in admitted)
        return used + self.snapshots(admitted) + self.least_pass(sequences.of("prefill"))

    def newcomer(self, sequence: SequenceState, *, alone: bool) -> int:
        """Return the bytes needed to admit one more sequence.

        These are its own, those of its smallest pass and, unless it would be alone, those of a copy
        while it joins a batch.
        """
        copied = 0 if alone else self._cost.of(sequence.total)
        own = sequence.width * self.row(sequence.charged) + sequence.arrived.beside
        return own + copied + self.smallest_pass(sequence)

    def row(self, tokens: int) -> int:
        """Return the bytes of one row of `tokens` tokens.

        These are its KV, that of a draft model, and its share of a decode step's temporary memory.
        """
        draft = self._draft.of(tokens) if self._draft else 0
        return self._cost.of(tokens) + draft + self._passes.chosen(1, tokens)

    def rectangle(self, members: Collection[SequenceState]) -> int:
        """Return the bytes of sequences that share arrays: each takes as much as the longest."""
        return sum(sequence.width for sequence in members) * self.row(
            max(sequence.charged for sequence in members)
        )

    def growth(self, batches: Iterable[Collection[SequenceState]]) -> tuple[int, int]:
        """The tokens that every sequence may add without more KV, and the bytes that this adds.

        A batch is charged for its longest sequence, so the others may grow beyond their own steps.
        """
        longest = [
            (max(sequence.charged for sequence in members), len(members)) for members in batches
        ]
        tokens = min(-length % GROWTH_STEP for length, _ in longest)
        growth = sum(
            rows * (self.row(length + tokens) - self.row(length)) for length, rows in longest
        )
        return tokens, growth

    def spare_rows(self, members: Collection[SequenceState], rows: int) -> int:
        """Return the bytes of rows that no sequence uses, in the rectangle of these sequences."""
        return rows * self._cost.of(max(sequence.charged for sequence in members))

    def snapshots(self, admitted: Collection[SequenceState]) -> int:
        """Return the bytes of the snapshots that these sequences have or will take."""
        if self._trims:
            return 0
        return sum(
            (len(sequence.snapshots) + sequence.wanted_snapshots)
            * self._cost.snapshot(sequence.prompt)
            for sequence in admitted
        )

    def entry(self, sequence: SequenceState, filled: int) -> int:
        """Bytes of an entry of a sequence's first `filled` tokens, with its snapshots."""
        return self._cost.of(filled) + len(sequence.snapshots) * self._cost.snapshot(
            sequence.prompt
        )

    # Passes.

    def least_pass(self, filling: Iterable[SequenceState]) -> int:
        """Bytes that let every one of these sequences in prefill proceed, one at a time."""
        return max(map(self.smallest_pass, filling), default=0)

    def smallest_pass(self, sequence: SequenceState) -> int:
        tokens = max(min(sequence.least, sequence.target - sequence.filled), sequence.fewest)
        return self.prefill_pass(
            sequence, tokens, sequence.charged if sequence.arrived.scores else sequence.total
        )

    def prefill_pass(self, sequence: SequenceState, tokens: int, seen: int, rows: int = 1) -> int:
        """Return the bytes of a pass of `rows` rows like this one, over `tokens` tokens of each.

        An image or a sound is encoded in a pass of its own; the pass that needs its features waits
        for that.
        """
        # Rows of different lengths, and long sequences in a sliding window, need an array as mask.
        several = rows > 1 or sequence.arrived.scores
        masked = seen if several else min(seen, self._window and self._window + tokens)
        nbytes = self._passes.of(rows * tokens, seen, masked)
        if sequence.arrived.scores or sequence.arrived.fresh:
            nbytes += rows * tokens * self._passes.per_choice
        reads = any(sequence.filled < stop for _, stop in sequence.arrived.spans)
        return max(nbytes, sequence.arrived.encodes if reads else 0)

    def shared_pass(self, members: Sequence[SequenceState], tokens: int, seen: int) -> int:
        """Return the bytes of a pass, and of the padding that it adds to the KV of its members."""
        padding = self.rectangle(members) - sum(self.rectangle([sequence]) for sequence in members)
        return self.prefill_pass(members[0], tokens, seen, len(members)) + padding

    def guesses(self, rows: int, width: int, longest: int) -> int:
        """Return the bytes that checking `width` guesses per row adds to a decode step.

        For a row with a recurrent state, the state from before the step is kept, both states may be
        combined into a third, and tokens are fed again.
        """
        state = self._cost.fixed
        fed = width + (MOST_AGAIN if state else 0)
        return self._passes.chosen(rows * fed, longest) + 2 * rows * state

    def fitting(self, sequence: SequenceState, tokens: int, left: int) -> int:
        """Return how many of the tokens a pass of at most `left` bytes can process; 0 if none."""
        least = sequence.fewest
        tokens = max(tokens, least)
        seen = (
            sequence.charged
            if sequence.arrived.scores
            else min(sequence.filled + tokens, sequence.target)
        )
        if self.prefill_pass(sequence, least, seen) > left:
            return 0
        while self.prefill_pass(sequence, tokens, seen) > left:
            tokens = max(tokens // 2, least)
        return tokens
