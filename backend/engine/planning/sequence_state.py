"""Defines the planner's record of one sequence, and the table of all of one loaded model."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.engine.planning.checkpoint_positions import LEAST_STORED
from backend.engine.planning.pace import SMALLEST_STEP
from backend.engine.planning.plan import Arrived
from backend.engine.planning.prefix_index import Match

AHEAD = 512  # tokens of output charged before they are generated


@dataclass(eq=False, slots=True)
class SequenceState:
    """The planner's record of one sequence.

    arrived: the event with which the sequence arrived.
    since: time of the arrival, in seconds.
    width: number of rows of KV that the sequence may use at once.
    state: `waiting`, `prefill` or `decode`.
    filled: number of tokens in the KV during prefill.
    least: number of tokens of the smallest prefill pass for which memory is reserved.
    generated: the generated tokens.
    positions: the checkpoint positions at which snapshots should be taken.
    snapshots: the lengths at which snapshots were taken.
    on_disk: number of tokens whose KV was read from a file; 0 after the sequence has started.
    batch: number of the batch in which the sequence decodes.
    group: number of the group of sequences that shared the latest prefill pass; 0 for a pass of its
        own.
    known: number of tokens to prefill, fixed when the sequence starts; 0 before.
    mask_seconds: the grammar's processor time for the latest token, in seconds.
    postponed: whether there was no time to compute the next mask.
    resting: whether the sequence was preempted because of its grammar.
    lost: whether the KV was lost to a failed allocation.
    preempted_in: number of the step in which the sequence was last preempted; -1 if it never was.
    match: the best cached prefix; None if the index has to be searched.
    shared: by the numbers of other sequences, the length of the common prefix.
    prompt: number of prompt tokens.
    """

    arrived: Arrived
    since: float
    width: int
    state: str = "waiting"
    filled: int = 0
    least: int = SMALLEST_STEP
    generated: list[int] = field(default_factory=list)
    positions: set[int] = field(default_factory=set)
    snapshots: set[int] = field(default_factory=set)
    on_disk: int = 0
    batch: int = 0
    group: int = 0
    known: int = 0
    mask_seconds: float = 0.0
    postponed: bool = False
    resting: bool = False
    lost: bool = False
    preempted_in: int = -1
    match: Match | None = None
    shared: dict[int, int] = field(default_factory=dict)
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.arrived.tokens)

    @property
    def number(self) -> int:
        return self.arrived.sequence

    @property
    def total(self) -> int:
        """Number of tokens of the prompt and the answer so far."""
        return self.prompt + len(self.generated)

    @property
    def target(self) -> int:
        """Number of tokens to prefill.

        The pass that computes the last of them also samples the next token. A sequence that scores
        continuations leaves its last token to the scoring passes.
        """
        known = self.known or self.total
        return known if self.arrived.joins else known - 1

    @property
    def charged(self) -> int:
        """Number of tokens for which memory is charged, including some that will be generated."""
        generated = len(self.generated)
        left = max(self.arrived.limit - generated, 0)
        ahead = AHEAD if left > AHEAD and not self.arrived.scores else left
        return self.prompt + generated + ahead

    @property
    def fewest(self) -> int:
        """Minimum number of tokens of a pass: one per row.

        If images and audio must not be divided among passes (`Arrived.whole`), it is the length of
        the longest item that is not prefilled yet, so that its memory is reserved from the start.
        """
        rows = max(self.width - 1, 1) if self.arrived.scores else 1
        if not self.arrived.whole:
            return rows
        return max(rows, *self.items_ahead, 0)

    @property
    def items_ahead(self) -> list[int]:
        """The lengths of the images and audio that are not completely prefilled."""
        return [stop - start for start, stop in self.arrived.spans if stop > self.filled]

    @property
    def feature_bytes(self) -> int:
        """Bytes of features, which are in memory until all tokens of their item are prefilled.

        A pass can begin inside one item and end inside the next, so the two largest items count.
        """
        return sum(sorted(self.items_ahead)[-2:]) * self.arrived.features

    @property
    def storable(self) -> int:
        """Number of tokens of a cached prefix with this KV; 0 if it is not worth storing."""
        if self.state == "waiting":
            return 0
        filled = self.total if self.state == "decode" else self.filled
        return filled if filled >= LEAST_STORED else 0

    @property
    def wanted_snapshots(self) -> int:
        """Number of snapshots that have yet to be taken."""
        return sum(length > self.filled for length in self.positions - self.snapshots)

    def uncut(self, length: int) -> int:
        """Return the greatest length up to `length` that is not inside an image or audio."""
        for start, stop in self.arrived.spans:
            if start < length < stop:
                return start
        return length

    def wait_again(self, step: int) -> None:
        """Set the state to waiting after a preemption; the answer so far will be prefilled too.

        `snapshots` does not change, because the KV may become a cached prefix in this step.
        """
        self.state, self.filled, self.group, self.known = "waiting", 0, 0, 0
        self.preempted_in = step
        self.postponed = False
        self.least = SMALLEST_STEP
        self.match = None


class SequenceTable:
    """The sequences of one loaded model.

    by_number: all sequences, in order of arrival.
    admitted: the sequences in prefill or decode, in order of admission.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, SequenceState] = {}
        self.admitted: dict[int, SequenceState] = {}

    def of(self, state: str) -> list[SequenceState]:
        """Return the sequences in a state: `waiting` ones by arrival, the others by admission."""
        among = self.by_number if state == "waiting" else self.admitted
        return [sequence for sequence in among.values() if sequence.state == state]

    def groups(self) -> list[list[SequenceState]]:
        """Return the sequences in prefill, grouped by shared passes."""
        groups: dict[int, list[SequenceState]] = {}
        for sequence in self.of("prefill"):
            groups.setdefault(sequence.group or -sequence.number, []).append(sequence)
        return list(groups.values())

    def batches(self) -> dict[int, list[SequenceState]]:
        """Return the decoding sequences, by the number of their batch."""
        batches: dict[int, list[SequenceState]] = {}
        for sequence in self.of("decode"):
            batches.setdefault(sequence.batch, []).append(sequence)
        return batches

    def preempt(self, sequence: SequenceState, step: int) -> None:
        """Set a sequence back to waiting; the executor drops its KV in this step."""
        self.admitted.pop(sequence.number, None)
        sequence.wait_again(step)

    def remove(self, number: int) -> SequenceState | None:
        """Remove and return a sequence; None if there is none.

        Its number stays in `SequenceState.shared` of others: thousands may be cancelled in one
        step, and no number is used again.
        """
        self.admitted.pop(number, None)
        return self.by_number.pop(number, None)
