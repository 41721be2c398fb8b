"""The planner's data about one sequence, without MLX."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.engine.planning.checkpoint_positions import LEAST_STORED
from backend.engine.planning.pace import SMALLEST_STEP
from backend.engine.planning.plan import Arrived
from backend.engine.planning.prefix_index import Match

AHEAD = 512  # tokens of output charged before they are generated


@dataclass(eq=False, slots=True)
class SequenceState:
    """The planner's data about one sequence.

    since: time of the arrival, in seconds.
    width: number of rows of KV that the sequence may use at once.
    state: `waiting`, `prefill` or `decode`.
    filled: number of tokens in the KV during prefill.
    least: number of tokens of the smallest prefill pass for which memory is reserved.
    positions: the checkpoint positions, at which a snapshot should be taken.
    snapshots: lengths at which a snapshot was taken.
    on_disk: number of tokens whose KV was read from a file for the first start.
    batch: number of the batch in which the sequence decodes.
    group: number of the group that shared the latest prefill pass; 0 if none did.
    known: number of tokens at the start, which are prefilled.
    mask_seconds: the grammar's processor time for the latest token.
    postponed: whether there was no time for the next mask.
    resting: whether the sequence was preempted because of its grammar.
    lost: whether the KV was lost to a failed allocation.
    preempted_in: number of the step in which the sequence was last preempted.
    match: the best cached prefix; None if the index must be searched.
    shared: length of the common prefix, by the number of the other sequence.
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
        """Tokens of the prompt and the answer so far."""
        return self.prompt + len(self.generated)

    @property
    def target(self) -> int:
        """Number of tokens to prefill. The pass with the last of them also samples the next token.

        When scoring, the last token is not prefilled, because scoring feeds it.
        """
        known = self.known or self.total
        return known if self.arrived.joins else known - 1

    @property
    def charged(self) -> int:
        """Tokens for which memory is charged."""
        generated = len(self.generated)
        left = max(self.arrived.limit - generated, 0)
        ahead = AHEAD if left > AHEAD and not self.arrived.scores else left
        return self.prompt + generated + ahead

    @property
    def fewest(self) -> int:
        """Minimum number of tokens of a pass: one per row, or the longest item ahead, if `whole`.

        The memory for the longest item is thus reserved from the start.
        """
        rows = max(self.width - 1, 1) if self.arrived.scores else 1
        if not self.arrived.whole:
            return rows
        ahead = (stop - start for start, stop in self.arrived.spans if stop > self.filled)
        return max(rows, *ahead, 0)

    @property
    def storable(self) -> int:
        """How many tokens a cached prefix with this KV would have; 0 if too few to store."""
        if self.state == "waiting" or not self.arrived.keep:
            return 0
        filled = self.total if self.state == "decode" else self.filled
        return filled if filled >= LEAST_STORED else 0

    @property
    def wanted_snapshots(self) -> int:
        """How many snapshots have yet to be taken."""
        return sum(length > self.filled for length in self.positions - self.snapshots)

    def uncut(self, length: int) -> int:
        """Return the longest prefix of at most `length` tokens that does not end inside media."""
        for start, stop in self.arrived.spans:
            if start < length < stop:
                return start
        return length

    def wait_again(self, step: int) -> None:
        """Return to waiting after the KV was lost; the answer so far will be prefilled too.

        The set of snapshots is left unchanged, because the KV may be stored in this step.
        """
        self.state, self.filled, self.group, self.known = "waiting", 0, 0, 0
        self.preempted_in = step
        self.postponed = False
        self.least = SMALLEST_STEP
        self.match = None
