"""What the planner knows of one sequence, plain data without MLX."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.engine.plan import Arrived
from backend.engine.prefill import SMALLEST_STEP
from backend.engine.prefix_index import Match
from backend.engine.snapshot_places import LEAST_STORED

AHEAD = 512  # tokens of output that a sequence is charged for before it generates them


@dataclass(eq=False, slots=True)
class SequenceState:
    """What the planner knows of one sequence.

    state: `waiting`, `prefill` or `decode`. filled: tokens in its KV while it is prefilled.
    least: tokens of the smallest prefill pass that there has to be room for.
    places: prompt lengths at which a snapshot is wanted; snapshots: those that the executor has.
    on_disk: tokens that a file gives when the sequence first starts. batch: which one it decodes
    in. group: of those that shared its latest prefill pass; 0: it had it to itself. known:
    tokens that it had when it started, of which the prefill consists. mask_seconds: what its
    grammar took for the latest token; resting: whether it was preempted because of that. prompt:
    its tokens.
    """

    arrived: Arrived
    since: float
    width: int
    state: str = "waiting"
    filled: int = 0
    least: int = SMALLEST_STEP
    generated: list[int] = field(default_factory=list)
    places: set[int] = field(default_factory=set)
    snapshots: set[int] = field(default_factory=set)
    on_disk: int = 0
    batch: int = 0
    group: int = 0
    known: int = 0
    mask_seconds: float = 0.0
    resting: bool = False
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
        """Tokens that are known: the prompt and what was generated."""
        return self.prompt + len(self.generated)

    @property
    def target(self) -> int:
        """Tokens to prefill. The pass that ends with the last one chooses what follows it; scoring
        feeds the last one itself."""
        known = self.known or self.total
        return known if self.arrived.joins else known - 1

    @property
    def charged(self) -> int:
        """Tokens that the memory is charged for."""
        generated = len(self.generated)
        left = max(self.arrived.limit - generated, 0)
        ahead = AHEAD if left > AHEAD and not self.arrived.scores else left
        return self.prompt + generated + ahead

    @property
    def fewest(self) -> int:
        """The fewest tokens of a pass: one of each row."""
        return max(self.width - 1, 1) if self.arrived.scores else 1

    @property
    def storable(self) -> int:
        """How many tokens an entry of what it has computed would hold; 0: not worth it."""
        if self.state == "waiting" or not self.arrived.keep:
            return 0
        filled = self.total if self.state == "decode" else self.filled
        return filled if filled >= LEAST_STORED else 0

    @property
    def wanted_snapshots(self) -> int:
        """How many are still to be taken."""
        return sum(place > self.filled for place in self.places - self.snapshots)

    def uncut(self, length: int) -> int:
        """The longest prefix of at most `length` tokens that cuts through no image or sound."""
        for start, stop in self.arrived.spans:
            if start < length < stop:
                return start
        return length

    def wait_again(self, step: int) -> None:
        """It lost its KV in this step, and starts again from its tokens."""
        self.state, self.filled, self.group, self.known = "waiting", 0, 0, 0
        self.preempted_in = step
        self.least = SMALLEST_STEP
        self.snapshots.clear()
        self.match = None
