"""A simulated executor: carries out plans by counting, and checks every plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from backend.engine.executing.step_times import StepTimes
from backend.engine.planning.plan import (
    DecodeTimed,
    Generated,
    Join,
    Leave,
    Limits,
    PlannerEvent,
    Prefill,
    Prefilled,
    PrefillTimed,
    Source,
    Start,
    Started,
    StepPlan,
    Stored,
)
from backend.engine.planning.prefix_index import PrefixKey
from tests.engine.simulation.setup import Setup

Snapshots = dict[int, int]  # prompt length → number of the snapshot


class BrokenPlanError(AssertionError):
    """A plan that refers to something that does not exist, or that does not fit in memory."""


@dataclass(eq=False, slots=True)
class DeviceSequence:
    """The device's state of a sequence. batch: 0 before decode. filled: -1 without KV."""

    number: int
    key: PrefixKey
    answer: Sequence[int]
    produced: int = 0
    filled: int = -1
    batch: int = 0
    snapshots: Snapshots = field(default_factory=dict)

    @property
    def total(self) -> int:
        return len(self.key) + self.produced


@dataclass(frozen=True, slots=True)
class _Entry:
    key: PrefixKey
    nbytes: int  # without the snapshots
    snapshots: Snapshots


@dataclass(slots=True)
class Ran:
    """The result of a step.

    tokens_after, seconds: time from its start to its tokens, and to its end. reused: prompt tokens
    that were reused, for each sequence that started.
    """

    events: list[PlannerEvent] = field(default_factory=list)
    tokens: list[DeviceSequence] = field(default_factory=list)
    reused: list[tuple[int, int]] = field(default_factory=list)
    tokens_after: float = 0.0
    seconds: float = 0.0
    computed: int = 0
    quiet: bool = False


class SimulatedDevice:
    """Sequences, batches and entries by number. peak: the most bytes of KV at the end of a step."""

    def __init__(self, setup: Setup, limits: Limits) -> None:
        self._setup = setup
        self._limits = limits
        self._entries: dict[int, _Entry] = {}
        self._entry_bytes = 0
        self._latest_entry = 0
        self._batches: dict[int, list[DeviceSequence]] = {}
        self._prefilling: dict[int, DeviceSequence] = {}
        self._snapshots: Counter[int] = Counter()
        self._latest_snapshot = 0
        self._shapes: set[tuple[int, int, int]] = set()  # of prefill passes
        self._clock = 0.0
        self._times = StepTimes(lambda: self._clock, wait=self._wait_until)
        self._times.in_order = setup.machine.kind == "cpu"
        self.sequences: dict[int, DeviceSequence] = {}
        self.peak = 0

    def add(self, sequence: DeviceSequence) -> None:
        self.sequences[sequence.number] = sequence

    @property
    def running(self) -> int:
        return len(self._prefilling) + sum(map(len, self._batches.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of KV of sequences and entries, snapshots included."""
        cost = self._limits.cost
        rows = sum(cost.of(sequence.filled) for sequence in self._prefilling.values())
        for members in self._batches.values():
            rows += len(members) * cost.of(max(sequence.total for sequence in members))
        return rows + self._entry_bytes + len(self._snapshots) * cost.snapshot(1 << 40)

    def run(self, plan: StepPlan) -> Ran:
        """One step. Raises BrokenPlanError."""
        ran = Ran(quiet=_quiet(plan) and not self._prefilling)
        began = self._clock
        copied = 0
        for number in plan.evict:
            self._drop_entry(number)
        for leave in plan.preempt:
            sequence = self._with_kv(leave.sequence)
            if leave.entry is not None:
                copied += self._store(sequence, leave.entry, ran)
            self._take_out(sequence)
        copied += self._leave(plan.leave, ran)
        for start in plan.start:
            copied += self._start(start, ran)
        copied += self._join(plan.join)
        _check(
            set(plan.decode) == set(self._batches), "the plan omits a batch or names an unknown one"
        )
        self._clock += self._setup.copy_seconds(copied)
        self._decode(1, ran)
        ran.tokens_after = self._clock - began
        for group in plan.prefill:
            self._prefill(group, ran)
        ran.seconds = self._clock - began
        self._weigh()
        return ran

    def decode_on(self, steps: int) -> Ran:
        """Run more decode steps with the same plan."""
        ran, began = Ran(quiet=True), self._clock
        self._decode(steps, ran)
        ran.tokens_after = ran.seconds = self._clock - began
        self._weigh()
        return ran

    def shortest_left(self) -> int:
        """Tokens until the next sequence ends."""
        return min(
            len(sequence.answer) - sequence.produced
            for batch in self._batches.values()
            for sequence in batch
        )

    # Sequences.

    def _with_kv(self, number: int) -> DeviceSequence:
        sequence = self.sequences.get(number)
        _check(sequence is not None and sequence.filled >= 0, f"sequence {number} has no KV")
        assert sequence is not None
        return sequence

    def _take_out(self, sequence: DeviceSequence) -> None:
        if sequence.batch:
            members = self._batches[sequence.batch]
            members.remove(sequence)
            if not members:
                del self._batches[sequence.batch]
        self._prefilling.pop(sequence.number, None)
        self._release(sequence.snapshots)
        sequence.batch, sequence.filled, sequence.snapshots = 0, -1, {}

    def _leave(self, leaves: Sequence[Leave], ran: Ran) -> int:
        cost, copied = self._limits.cost, 0
        for leave in leaves:
            sequence = self.sequences.pop(leave.sequence, None)
            _check(sequence is not None, f"sequence {leave.sequence} leaves twice")
            assert sequence is not None
            if leave.entry is not None:
                self._store(sequence, leave.entry, ran)
                copied += cost.of(sequence.total) if sequence.batch else 0
            batch = sequence.batch
            if sequence.filled >= 0:
                self._take_out(sequence)
            if batch in self._batches:
                copied += cost.of(sequence.total) * len(self._batches[batch])
        return copied

    def _start(self, start: Start, ran: Ran) -> int:
        """Start a sequence; returns the copied bytes."""
        sequence = self.sequences.get(start.sequence)
        _check(sequence is not None, f"sequence {start.sequence} is not known")
        assert sequence is not None
        _check(sequence.filled < 0, f"sequence {sequence.number} is started twice")
        _check(len(start.tokens) == sequence.total, f"sequence {sequence.number} lost tokens")
        source, copied = start.source, 0
        sequence.filled = 0
        if source is not None:
            _check(0 < source.length < sequence.total, "a prefix is empty, or all of the tokens")
            kept = dict(self._source(sequence, source))
            if source.length in start.snapshots and source.length not in kept:
                self._latest_snapshot += 1  # a new snapshot, at the end of the copied prefix
                kept[source.length] = self._latest_snapshot
            _check(set(start.snapshots) <= kept.keys(), "a snapshot is missing")
            sequence.snapshots = {at: kept[at] for at in start.snapshots}
            self._snapshots.update(sequence.snapshots.values())
            sequence.filled = source.length
            if source.move:
                self._drop_entry(source.number)
            else:
                copied = self._limits.cost.of(source.length)
        self._prefilling[sequence.number] = sequence
        ran.events.append(Started(sequence.number, sequence.filled))
        ran.reused.append((sequence.number, sequence.filled))
        return copied

    def _source(self, sequence: DeviceSequence, source: Source) -> Snapshots:
        if source.kind == "entry":
            entry = self._entries.get(source.number)
            _check(entry is not None, f"entry {source.number} is gone")
            assert entry is not None
            whole, shared, kept = len(entry.key), entry.key, entry.snapshots
        else:
            _check(source.kind == "sequence", "nothing is on disk here")
            other = self._with_kv(source.number)
            whole = other.total if other.batch else other.filled
            shared, kept = other.key, other.snapshots
        length = source.length
        _check(length <= whole, "a source is shorter than it should be")
        _check(
            sequence.key.shared(shared) >= min(length, len(sequence.key), len(shared)),
            "other tokens",
        )
        exact = length in kept or (source.kind == "entry" and length == whole)
        _check(self._limits.trims or exact, f"no snapshot at {length}")
        return kept

    def _join(self, joins: Sequence[Join]) -> int:
        """Add sequences to batches; returns the copied bytes, as changed batches are rebuilt."""
        changed = set()
        for join in joins:
            sequence = self._with_kv(join.sequence)
            _check(
                sequence.batch == 0 and sequence.filled == sequence.total,
                "joined before its prefill",
            )
            del self._prefilling[sequence.number]
            sequence.batch = join.batch
            self._batches.setdefault(join.batch, []).append(sequence)
            changed.add(join.batch)
        cost = self._limits.cost
        return sum(
            len(members) * cost.of(max(sequence.total for sequence in members))
            for members in (self._batches[number] for number in changed)
        )

    # Computing.

    def _wait_until(self, ends: Sequence[float]) -> None:
        self._clock = max(self._clock, *ends)

    def _decode(self, steps: int, ran: Ran) -> None:
        seconds = 0.0
        for members in self._batches.values():
            longest = max(sequence.total for sequence in members)
            seconds += self._setup.decode_seconds(len(members), longest)
            for sequence in members:
                until = sequence.produced + steps
                ran.events.append(
                    Generated({sequence.number: sequence.answer[sequence.produced : until]})
                )
                sequence.produced = until
                ran.tokens.append(sequence)
        for _ in range(steps if seconds else 0):
            self._times.begin()
            if self._times.in_order:
                self._clock += seconds
            self._times.decode_launched([self._clock + seconds])
            self._times.wait_for_decode()
        ran.events += map(DecodeTimed, self._times.take_decoded())

    def _prefill(self, group: Sequence[Prefill], ran: Ran) -> None:
        _check(len(group) == 1 or self._limits.together, "sequences cannot share a pass")
        _check(len({part.sequence for part in group}) == len(group), "twice in one pass")
        for part in group:
            sequence = self._with_kv(part.sequence)
            _check(sequence.batch == 0, "prefilled while it decodes")
            _check(part.start == sequence.filled, "prefill leaves a gap, or goes back")
            _check(part.start < part.end <= sequence.total, "prefill is empty, or too long")
            sequence.filled = part.end
            if part.snapshot:
                self._latest_snapshot += 1
                sequence.snapshots[part.end] = self._latest_snapshot
                self._snapshots[self._latest_snapshot] += 1
            ran.events.append(Prefilled(part.sequence, part.end, part.snapshot))
        width = max(part.end - part.start for part in group)
        ran.computed += width * len(group)
        behind = max(part.start for part in group)
        seconds = self._setup.prefill_seconds(len(group), width, behind)
        shape = len(group), width, behind
        if shape not in self._shapes:
            self._shapes.add(shape)
            seconds += self._setup.machine.shape
        launched = self._clock
        self._clock += seconds
        seconds = self._times.finished(launched, self._clock)
        ran.events.append(PrefillTimed(width * len(group), seconds, behind))

    # Entries.

    def _store(self, sequence: DeviceSequence, number: int, ran: Ran) -> int:
        """Store an entry; returns its bytes."""
        _check(sequence.filled >= 0, "stored without KV")
        _check(number > self._latest_entry, f"entry {number} is not new")
        self._latest_entry = number
        length = sequence.total if sequence.batch else sequence.filled
        after = tuple(sequence.answer[: max(length - len(sequence.key), 0)])
        key = sequence.key.extended(after) if after else sequence.key.prefix(length)
        cost = self._limits.cost
        entry = _Entry(key, cost.of(length), dict(sequence.snapshots))
        self._entries[number] = entry
        self._entry_bytes += entry.nbytes
        self._snapshots.update(entry.snapshots.values())
        places = None if self._limits.trims else tuple(sorted({*entry.snapshots, length}))
        nbytes = entry.nbytes + len(entry.snapshots) * cost.snapshot(length)
        ran.events.append(Stored(number, length, after, nbytes, places))
        return entry.nbytes

    def _drop_entry(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        _check(entry is not None, f"entry {number} is not there")
        assert entry is not None
        self._entry_bytes -= entry.nbytes
        self._release(entry.snapshots)

    def _release(self, snapshots: Snapshots) -> None:
        for mark in snapshots.values():
            self._snapshots[mark] -= 1
            if not self._snapshots[mark]:
                del self._snapshots[mark]

    def _weigh(self) -> None:
        nbytes, budget, running = self.nbytes, self._limits.budget, self.running
        self.peak = max(self.peak, nbytes)
        _check(nbytes <= budget, f"{nbytes} bytes of KV where {budget} fit")
        _check(running <= self._limits.slots, f"{running} sequences in too few slots")


def _quiet(plan: StepPlan) -> bool:
    """Whether the plan does nothing but decode."""
    acts = (plan.evict, plan.preempt, plan.leave, plan.refuse, plan.start, plan.join, plan.prefill)
    return bool(plan.decode) and not any(acts) and not plan.score


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise BrokenPlanError(problem)
