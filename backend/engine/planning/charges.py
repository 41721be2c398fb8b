"""Computes the bytes that the planner charges for sequences, prefill passes and cached prefixes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

from backend.engine.planning.draft_width import CATCH_UP, MOST_AGAIN, NEAR
from backend.engine.planning.pace import SMALLEST_STEP
from backend.engine.planning.plan import GROWTH_STEP, CacheCost, Limits, PassCost
from backend.engine.planning.sequence_state import SequenceState, SequenceTable


def longest_alone(
    cost: CacheCost, passes: PassCost, draft: CacheCost | None, budget: int, most: int
) -> int:
    """Return the maximum number of tokens of a sequence that runs alone, in the smallest passes.

    draft: cost of the KV of a draft model, if there is one.
    budget: bytes that the memory limit leaves after the weights.
    most: upper bound of the result.
    """
    window = max((size for _, size in cost.windowed), default=0)

    def needed(tokens: int) -> int:
        kv = cost.copied(tokens) + (draft.copied(tokens) if draft else 0)
        masked = min(tokens, window and window + SMALLEST_STEP)
        prefill = passes.of(SMALLEST_STEP, tokens, masked) + SMALLEST_STEP * passes.per_choice
        return kv + passes.chosen(1, tokens) + prefill + max(cost.fixed - passes.per_row, 0)

    return bisect_right(range(1, most + 1), budget, key=needed)


class Charges:
    """Computes, for one loaded model, the bytes of everything that it runs and stores."""

    def __init__(self, limits: Limits) -> None:
        self._cost, self._draft, self._draft_passes = limits.cost, limits.draft, limits.draft_passes
        self._passes, self._trims = limits.passes, limits.trims
        self._window = max((most for _, most in limits.cost.windowed), default=0)

    def used(self, sequences: SequenceTable) -> int:
        """Return the bytes that the admitted sequences are charged for."""
        admitted = sequences.admitted.values()
        used = sum(map(self.rectangle, (*sequences.groups(), *sequences.batches().values())))
        used += sum(sequence.arrived.beside for sequence in admitted)
        filling = sequences.of("prefill")
        used += sum(sequence.feature_bytes for sequence in filling if sequence.arrived.features)
        return used + self.snapshots(admitted) + self.least_pass(filling)

    def admission(self, sequence: SequenceState) -> int:
        """Return the bytes of a sequence's rows and smallest pass, which its admission needs."""
        rows = sequence.width * self.row(sequence.charged)
        beside = sequence.arrived.beside + sequence.feature_bytes
        return rows + beside + self.smallest_pass(sequence)

    def row(self, tokens: int) -> int:
        """Return the bytes of a row: its KV, a draft model's KV, its share of a decode step."""
        draft = self._draft.copied(tokens) if self._draft else 0
        return self._cost.copied(tokens) + draft + self._passes.chosen(1, tokens)

    def rectangle(self, members: Collection[SequenceState]) -> int:
        """Return the bytes of sequences that share arrays, in which all rows are equally long."""
        return sum(sequence.width for sequence in members) * self.row(
            max(sequence.charged for sequence in members)
        )

    def growth(self, batches: Iterable[Collection[SequenceState]]) -> tuple[int, int]:
        """Return how many tokens each sequence may add without new buffers, and their bytes.

        A batch is charged for its longest sequence, so only that sequence limits the growth.
        """
        longest = [
            (max(sequence.charged for sequence in members), len(members)) for members in batches
        ]
        tokens = min(-length % GROWTH_STEP for length, _ in longest)
        growth = sum(
            rows * (self.row(length + tokens) - self.row(length)) for length, rows in longest
        )
        return tokens, growth

    def unused_rows(self, members: Collection[SequenceState], rows: int) -> int:
        """Return the bytes of unused rows in the arrays that these sequences share."""
        return rows * self._cost.copied(max(sequence.charged for sequence in members))

    def snapshots(self, admitted: Collection[SequenceState]) -> int:
        """Return the bytes of snapshots that these sequences have taken or are planned to take."""
        if self._trims:
            return 0
        return sum(
            (len(sequence.snapshots) + sequence.wanted_snapshots)
            * self._cost.snapshot(sequence.prompt)
            for sequence in admitted
        )

    def entry(self, sequence: SequenceState, filled: int) -> int:
        """Return the bytes of a cached prefix: `filled` tokens of a sequence, and its snapshots."""
        return self._cost.copied(filled) + len(sequence.snapshots) * self._cost.snapshot(
            sequence.prompt
        )

    # Passes.

    def least_pass(self, filling: Iterable[SequenceState]) -> int:
        """Return the bytes that suffice to prefill these sequences one at a time."""
        return max(map(self.smallest_pass, filling), default=0)

    def smallest_pass(self, sequence: SequenceState) -> int:
        tokens = max(min(sequence.least, sequence.target - sequence.filled), sequence.fewest)
        return self.prefill_pass(
            sequence, tokens, sequence.charged if sequence.arrived.scores else sequence.total
        )

    def prefill_pass(self, sequence: SequenceState, tokens: int, seen: int, rows: int = 1) -> int:
        """Return the temporary bytes of a prefill pass of `rows` rows like this sequence.

        Images and audio are encoded in a separate pass before the pass that needs their features,
        so the larger of the two passes counts. The features of all items in the pass are joined, so
        they exist twice.

        tokens: number of tokens per row.
        seen: number of tokens in the KV of a row after the pass.
        """
        # Rows of different lengths, and long sequences in a sliding window, need an array as mask.
        several = rows > 1 or sequence.arrived.scores
        masked = seen if several else min(seen, self._window and self._window + tokens)
        # Each recurrent state exists twice: before and after the pass.
        states = max(self._cost.fixed - self._passes.per_row, 0)
        nbytes = self._passes.of(rows * tokens, seen, masked, rows) + rows * states
        if sequence.arrived.scores or sequence.arrived.fresh:
            nbytes += rows * tokens * self._passes.per_choice
        if sequence.items_ahead:
            features = 2 * tokens * sequence.arrived.features
            nbytes = features + max(nbytes, sequence.arrived.encodes)
        return nbytes

    def shared_pass(self, members: Sequence[SequenceState], tokens: int, seen: int) -> int:
        """Return the bytes of a pass, and of the padding that it adds to the KV of its members."""
        padding = self.rectangle(members) - sum(self.rectangle([sequence]) for sequence in members)
        return self.prefill_pass(members[0], tokens, seen, len(members)) + padding

    def draft_tokens(self, rows: int, width: int, longest: int) -> int:
        """Return the bytes that drafting and checking `width` tokens per row adds to a decode step.

        The drafter's own passes run before the step: for one row that catches up, and for all rows.
        A recurrent state cannot be truncated after a rejected draft token. So the states from
        before the step are stored too, a combination of both may be needed, and some tokens are fed
        again.
        """
        state = self._cost.fixed
        fed = width + (MOST_AGAIN if state else 0)
        drafting = self._draft_passes.of(rows * NEAR, longest, longest, rows)
        drafting += rows * self._draft_passes.per_choice
        drafting = max(drafting, self._draft_passes.of(CATCH_UP, longest))
        return drafting + self._passes.chosen(rows, longest, fed) + 2 * rows * state

    def fitting(self, sequence: SequenceState, tokens: int, left: int) -> int:
        """Return how many tokens a prefill pass of at most `left` bytes can have; 0 if none fit.

        tokens: upper bound of the result, unless a pass must have more.
        """
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
