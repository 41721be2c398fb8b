"""Decides which prompts a step prefills, how many tokens of each, and which prompts share a pass.

A step may last only as long as running streams may wait, so prompts take turns. Plain Python
without MLX.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.planning.charges import Charges
from backend.engine.planning.pace import SMALLEST_STEP, Pace
from backend.engine.planning.plan import Limits, Prefill, Score
from backend.engine.planning.sequence_state import SequenceState

UNEVEN = 1024  # tokens by which the lengths in a batch may differ, whatever the padding costs
_SHARE = 0.75  # maximum share of the device's time for prefill while sequences decode
# A step may have this multiple of the usual number of tokens if that completes all prefills.
_LAST_STEP = 1.5
# Share of the usual duration of a step for a long prompt alone: the next prompt waits for the step.
_LONE = 0.5
# A step beside running streams may have this multiple of the allowed pause if that completes
# prompts, and with a decode step it may have the second multiple.
_COMPLETING = 2.0
_LONGEST_GAP = 2.5


class PrefillTurns:
    """Chooses the prefill passes of each step, for one loaded model."""

    def __init__(self, limits: Limits, charges: Charges, pace: Pace) -> None:
        self._together, self._longest = limits.together, limits.prefill_chunk
        self._charges, self._pace = charges, pace
        # seconds of decode steps that must follow before the next prefill pass
        self._owed_to_decode = 0.0
        self._decode_seconds = 0.0  # of the latest decode step
        self._formed = 0  # number of the latest group of sequences that shared a pass
        self._scored = False  # whether the latest step with time for prefill used it for scoring
        # whether the next step is for the shortest prompt, if a step is too short for two prompts
        self._shortest_next = False

    def prefilled(self, seconds: float) -> None:
        """Record the duration of a prefill pass in seconds."""
        self._owed_to_decode += seconds * (1 - _SHARE) / _SHARE

    def decoded(self, seconds: float, step: float) -> None:
        """Record the duration of decode steps, and of the latest of them, in seconds."""
        self._decode_seconds = step
        self._owed_to_decode = max(self._owed_to_decode - seconds, 0.0)

    def choose(
        self, filling: Sequence[SequenceState], now: float, free: int, *, running: bool
    ) -> tuple[list[tuple[Prefill, ...]], list[Score], int]:
        """Choose what this step prefills and scores, within the pause allowed for running streams.

        Returns the prefill passes, the scores, and the temporary bytes of all passes together. They
        are added up, because all passes may be in MLX's queue at the same time.

        now: seconds, on the clock of `SequenceState.since`.
        free: bytes that admitted sequences leave for passes.
        running: whether other sequences decode.
        """
        if not running:
            self._owed_to_decode = 0.0
        if self._owed_to_decode > 0:
            return [], [], 0
        order = self._order(filling, now)
        seconds = self._pace.pause(running=running)
        if order:
            seconds = self._to_complete(order, seconds) if running else self._longer(order)
        self._scored = False
        halved = self._prefer_shortest(order, running=running)
        # The seconds of the chunks that complete no prompt. A step that completes a prompt has few
        # of them, so that it ends soon: a first token is due.
        beside = float("inf")
        if not running and self._completes(order, self._pace.fitting(seconds) // 2):
            beside = self._pace.pause(running=True)
        passes: list[tuple[Prefill, ...]] = []
        scores: list[Score] = []
        left = free
        while order and seconds > 0:
            sequence = order.pop(0)
            token_budget = self._pace.fitting(seconds, sequence.filled)
            if sequence.filled >= sequence.target:
                if fitting := self._charges.fitting(sequence, token_budget, left):
                    left -= self._charges.prefill_pass(sequence, fitting, sequence.charged)
                    scores.append(Score(sequence.number, fitting))
                    self._scored = True
                break
            most = token_budget // 2 if halved else token_budget
            halved = False
            cut = sequence.target - sequence.filled > most
            if cut:
                if beside <= 0:
                    continue
                token_budget = most = min(most, self._pace.fitting(beside, sequence.filled))
            fitting = self._charges.fitting(sequence, max(most, SMALLEST_STEP), left)
            least = min(self._pace.width, sequence.target - sequence.filled) if passes else 1
            if fitting < least or (passes and self._pace.seconds(least, sequence.filled) > seconds):
                continue
            group = self._group(sequence, fitting, order, token_budget, left)
            members = [member for member, _ in group]
            order = [other for other in order if other not in members]
            parts = [part for _, part in group]
            passes.append(tuple(parts))
            seconds -= self._seconds(parts)
            beside -= self._seconds(parts) * cut
            left -= self._bytes(group)
            self._formed += len(group) > 1
            for member in members:
                member.group = self._formed if len(group) > 1 else 0
        return passes, scores, free - left

    def _order(self, filling: Sequence[SequenceState], now: float) -> list[SequenceState]:
        """Return the sequences that this step may prefill, the most urgent first."""
        ready = [sequence for sequence in filling if sequence.filled < sequence.target]
        # The duration of scoring is not known in advance, so scoring and prompts take turns.
        if not (ready and self._scored):
            ready += [
                sequence
                for sequence in filling
                if sequence.filled >= sequence.target and sequence.arrived.scores
            ]

        def urgency(sequence: SequenceState) -> tuple[float, int]:
            return self._pace.urgency(
                sequence.target - sequence.filled, now - sequence.since
            ), sequence.number

        return sorted(ready, key=urgency)

    def _completes(self, order: Sequence[SequenceState], tokens: int) -> bool:
        """Return whether a step with this many tokens can complete one of several prompts."""
        return len(order) > 1 and any(
            sequence.filled < sequence.target <= sequence.filled + tokens for sequence in order
        )

    def _longer(self, order: Sequence[SequenceState]) -> float:
        """Return the maximum seconds of a step while no sequence decodes.

        The step may take longer than usual if that completes all prefills. Otherwise a few
        remaining tokens would be prefilled much later, between the decode steps of others.
        """
        remaining = [_remaining(sequence) for sequence in order]
        behind = max(sequence.filled for sequence in order)
        whole = self._pace.tokens(running=False, behind=behind)
        most = min(round(_LAST_STEP * whole), self._longest)
        if whole < sum(remaining) <= most:
            return self._pace.seconds(min(len(remaining) * max(remaining), most), behind)
        pause = self._pace.pause(running=False)
        return pause * _LONE if len(order) == 1 and remaining[0] > most else pause

    def _to_complete(self, order: Sequence[SequenceState], pause: float) -> float:
        """Return the maximum seconds of a step beside running streams.

        It is longer than the pause if that completes prompts. Otherwise these would need another
        pass, which would repeat the fixed part and interrupt all streams once more.
        """
        seconds, tokens = pause, 0
        most = min(_COMPLETING * pause, _LONGEST_GAP * pause - self._decode_seconds)
        for sequence in sorted(order, key=_remaining):
            tokens += _remaining(sequence)
            # `Pace.fitting` rounds down to a multiple of SMALLEST_STEP.
            needed = self._pace.seconds(tokens + SMALLEST_STEP - 1, sequence.filled)
            if needed > most:
                break
            seconds = max(seconds, needed)
        return seconds

    def _prefer_shortest(self, order: list[SequenceState], *, running: bool) -> bool:
        """Move the shortest prompt forward in `order`, so that it gets half of the step.

        Without this, every new prompt would wait until a more urgent long prompt is completed.
        Returns whether the first sequence may use only half of the step.
        """
        shortest = min(order, key=_remaining, default=None)
        if shortest is None or shortest is order[0]:
            return False
        order.remove(shortest)
        self._shortest_next = not self._shortest_next
        half = self._pace.tokens(running=running, behind=order[0].filled) // 2
        first = half < self._pace.width and self._shortest_next
        order.insert(0 if first else 1, shortest)
        return True

    def _group(
        self,
        first: SequenceState,
        tokens: int,
        others: Sequence[SequenceState],
        token_budget: int,
        left: int,
    ) -> list[tuple[SequenceState, Prefill]]:
        """Return the next chunk of a prompt, and the chunks of other prompts that share its pass.

        All chunks of a pass are padded to the longest. So a chunk shares the pass only if the
        padding costs less time than a separate pass.

        tokens: maximum number of tokens of the first chunk.
        token_budget: maximum number of tokens of the pass, including padding.
        left: bytes for the pass.
        """
        group = [(first, next_chunk(first, tokens))]
        if not self._together or first.arrived.alone:
            return group
        candidates = [
            (other, next_chunk(other, token_budget))
            for other in others
            if not other.arrived.alone and other.filled < other.target
        ]
        for added in sorted(candidates, key=lambda pair: _size(pair[1])):
            more = [*group, added]
            parts = [part for _, part in more]
            ends = [part.end for part in parts]
            # A pass of up to this many tokens takes about as long as a pass of the first chunk.
            quick = self._pace.width if max(ends) <= UNEVEN else 0
            if _padded(parts) > max(token_budget, quick):
                continue
            if self._seconds(parts) > self._seconds(parts[:-1]) + self._seconds(parts[-1:]):
                continue
            if max(ends) - min(ends) > UNEVEN:
                continue  # The shorter KV would be copied into rows as long as the longest.
            if self._bytes(more) <= left:
                group = more
        return group

    def _seconds(self, parts: Sequence[Prefill]) -> float:
        """Return the predicted seconds of a pass."""
        return self._pace.seconds(_padded(parts), max(part.start for part in parts))

    def _bytes(self, group: Sequence[tuple[SequenceState, Prefill]]) -> int:
        members = [sequence for sequence, _ in group]
        longest = max(_size(part) for _, part in group)
        return self._charges.shared_pass(members, longest, max(part.end for _, part in group))


def _remaining(sequence: SequenceState) -> int:
    return sequence.target - sequence.filled


def next_chunk(sequence: SequenceState, token_budget: int) -> Prefill:
    """Return the next chunk of a prompt, up to the next checkpoint position."""
    end = min(sequence.filled + token_budget, sequence.target)
    end = min([end, *(length for length in sequence.positions if length > sequence.filled)])
    if sequence.arrived.whole:
        end = sequence.uncut(end)
    return Prefill(sequence.number, sequence.filled, end, snapshot=end in sequence.positions)


def _size(part: Prefill) -> int:
    return part.end - part.start


def _padded(group: Sequence[Prefill]) -> int:
    """Return the tokens that a pass computes, including padding."""
    return len(group) * max(map(_size, group))
