"""Carries out plans with plain lists of tokens instead of KV, and checks every part of each plan.

A list has the tokens that the KV would have been computed from. So if a plan starts a sequence from
the wrong source, the list differs from the sequence's own tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from backend.engine.planning.plan import (
    Arrived,
    DecodeTimed,
    Drafted,
    Ended,
    Generated,
    Limits,
    Lost,
    Masked,
    MemoryShort,
    NotStored,
    OtherBytes,
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
from backend.engine.planning.prefill_turns import UNEVEN

WINDOW = 40  # a cache of at most this many tokens can be cut to any length, as with sliding windows
PREFILL_SECONDS = 0.001  # of a token
PASS_SECONDS = 0.03  # of a pass, besides those of its tokens
DECODE_SECONDS = 0.01  # of a step


@dataclass(eq=False, slots=True)
class FakeSequence:
    """kv: None while it waits. pending: sampled and not yet delivered. ends_at: tokens after which
    it ends by itself. scores_left: steps of scoring."""

    arrived: Arrived
    ends_at: int
    scores_left: int
    on_disk: int
    kv: list[int] | None = None
    width: int = 1
    group: int = 0
    batch: int | None = None
    snapshots: set[int] = field(default_factory=set)
    generated: list[int] = field(default_factory=list)
    pending: bool = False
    first_delivered: bool = False
    known: int = 0
    started_short: bool = False

    @property
    def number(self) -> int:
        return self.arrived.sequence

    @property
    def content(self) -> list[int]:
        """The tokens of its KV, in the form that caches compare."""
        return [*self.arrived.key.tokens.tolist(), *self.generated]

    @property
    def target(self) -> int:
        """Tokens to prefill."""
        return self.known - (not self.arrived.joins)

    def sampled(self, at: int) -> int:
        return (7 * self.number + at) % 5

    def reset(self) -> None:
        self.kv, self.batch, self.group, self.pending = None, None, 0, False
        self.first_delivered = False
        self.snapshots = set()


@dataclass(frozen=True, slots=True)
class FakeEntry:
    kv: tuple[int, ...]
    snapshots: frozenset[int]
    anywhere: bool
    nbytes: int

    def serves(self, length: int) -> bool:
        return self.anywhere or length == len(self.kv) or length in self.snapshots


@dataclass(frozen=True, slots=True)
class Faults:
    """How often things go wrong, from 0 (never) to 1."""

    short_start: float = 0.0
    short_prefill: float = 0.0
    unstored: float = 0.0
    lost: float = 0.0
    failed: float = 0.0


class FakeExecutor:
    """ended: the reason why each sequence ended, by its number."""

    def __init__(self, limits: Limits, dice: random.Random, faults: Faults) -> None:
        self.limits, self.dice, self.faults = limits, dice, faults
        self.sequences: dict[int, FakeSequence] = {}
        self.entries: dict[int, FakeEntry] = {}
        self.ended: dict[int, str] = {}
        self.texts: list[tuple[int, ...]] = []  # tokens of ended sequences, for prompts to extend
        self.seconds = 0.0
        self.other = 0
        self.features = 0
        self.lacking = 0  # bytes of memory for which a text to embed waits
        self.files: dict[int, int] = {}  # bytes read from disk for waiting sequences, as reported
        self._formed = 0
        self._storing: set[int] = set()
        self._numbers: set[int] = set()
        self._events: list[PlannerEvent] = []

    def add(self, arrived: Arrived, ends_at: int, scores: int) -> None:
        self.sequences[arrived.sequence] = FakeSequence(arrived, ends_at, scores, arrived.on_disk)

    @property
    def running(self) -> list[FakeSequence]:
        return [one for one in self.sequences.values() if one.kv is not None]

    @property
    def charged(self) -> int:
        """Bytes that the plans so far may use, by the rule that the planner must follow."""
        used = 0
        homes: dict[tuple[int | None, int], list[FakeSequence]] = {}
        for one in self.running:
            group = one.group or -one.number
            homes.setdefault((one.batch, 0 if one.batch is not None else group), []).append(one)
        for members in homes.values():
            used += sum(one.width for one in members) * max(map(self._cost, members))
        for one in self.running:
            used += one.arrived.beside
            if one.batch is None and one.kv is not None:
                at = len(one.kv)
                begun = (end - start for start, end in one.arrived.spans if start < at < end)
                used += sum(begun) * one.arrived.features
            used += len(one.snapshots) * self.limits.cost.snapshot(len(one.arrived.tokens))
        return used

    def _cost(self, one: FakeSequence) -> int:
        """Bytes of a row, with what a decode step computes with for it."""
        passes = self.limits.passes
        longest = self._longest(one)
        pairs = math.ceil((passes.per_pair + passes.per_mask) * longest)
        return self.limits.cost.of(longest) + passes.per_token + pairs + passes.per_choice

    def _longest(self, one: FakeSequence) -> int:
        left = one.arrived.limit - len(one.generated)
        ahead = left if one.arrived.scores else min(left, 512)
        return len(one.arrived.tokens) + len(one.generated) + max(ahead, 0)

    def _passes(self, plan: StepPlan) -> int:
        """Bytes that the passes of a plan compute with, all in the queue together."""
        passes = self.limits.passes
        nbytes = 0
        for group in plan.prefill:
            members = [self.sequences[part.sequence] for part in group]
            if len(members) > 1:
                rows = [one.width * self._cost(one) for one in members]
                nbytes += sum(one.width for one in members) * max(map(self._cost, members))
                nbytes -= sum(rows)
            tokens = len(group) * max(part.end - part.start for part in group)
            per_pair = passes.per_pair + passes.per_mask * (len(group) > 1)
            pairs = tokens * math.ceil(per_pair * max(part.end for part in group))
            first = self.sequences[group[0].sequence].arrived
            choices = tokens * passes.per_choice if first.fresh else 0
            largest = first.encodes if any(group[0].start < end for _, end in first.spans) else 0
            nbytes += max(tokens * passes.per_token + pairs + choices, largest)
            start, stop = group[0].start, max(part.end for part in group)
            read = [span for span in first.spans if span[0] < stop and span[1] > start]
            encoded = sum(end - begin for begin, end in read if begin >= start)
            nbytes += (encoded + tokens * bool(read)) * first.features  # and joined
        for score in plan.score:
            one = self.sequences[score.sequence]
            pairs = math.ceil((passes.per_pair + passes.per_mask) * self._longest(one))
            assert score.budget >= one.width - 1, "a token of each continuation"
            nbytes += score.budget * (passes.per_token + pairs + passes.per_choice)
        return nbytes

    def _check_memory(self, plan: StepPlan, free_for_texts: int) -> None:
        """Check all limits. An entry that is being stored counts from the next step on.

        Texts to embed must leave room for it already. While a single sequence runs, memory that
        will soon be free may exceed the limit, but then the plan must start nothing.
        """
        if plan.features is not None:
            assert plan.features < self.features
            self.features = plan.features
        kept = [entry for at, entry in self.entries.items() if at not in self._storing]
        stored = sum(entry.nbytes for entry in kept)
        assert stored <= self.limits.prompt_cache
        assert not 0 < self.limits.max_entries < len(kept)
        files = self.files.keys() & self._read().keys()
        budget = self.limits.budget - self.other - sum(self.files[number] for number in files)
        if len(self.running) == 1 and self.charged > budget:
            assert not plan.start
            assert not plan.prefill
            assert not plan.score
            assert not stored
            budget = self.limits.budget
        used = self.charged + stored + self.features + self._passes(plan)
        assert used <= budget
        storing = sum(self.entries[at].nbytes for at in self._storing)
        assert free_for_texts <= 0 or used + storing + free_for_texts <= budget

    def end(self, number: int, why: str) -> None:
        assert number not in self.ended, f"sequence {number} ends twice"
        self.ended[number] = why

    def cancel(self, number: int) -> list[PlannerEvent]:
        if number in self.ended:
            return []
        self.end(number, "cancelled")
        return [Ended(number)]

    # Following a plan.

    def follow(self, plan: StepPlan, free_for_texts: int = 0) -> list[PlannerEvent]:
        """Carry out a plan; returns the events for the planner.

        free_for_texts: bytes that the planner says are free beside the plan.
        """
        self._events = []
        self.seconds = 0.0
        self._storing.clear()
        for one in self.sequences.values():
            one.started_short = False
        for number in plan.unread:
            one = self.sequences[number]
            assert one.kv is None
            assert one.on_disk
            one.on_disk = 0
        for entry in plan.evict:
            del self.entries[entry]
        for preempted in plan.preempt:
            self._preempt(self.sequences[preempted.sequence], preempted.entry)
        for refusal in plan.refuse:
            assert refusal.needed > refusal.budget
            self.end(refusal.sequence, "refused")
        for leave in plan.leave:
            self._leave(leave.sequence, leave.entry)
        gone = {refusal.sequence for refusal in plan.refuse}
        assert not gone & self.sequences.keys(), "refused ones leave in the same step"
        for start in plan.start:
            self._start(start)
        assert len(self.running) <= self.limits.slots
        for join in plan.join:
            self._join(join.sequence, join.batch)
        self._check_memory(plan, free_for_texts)
        decoding = {one.batch for one in self.running if one.batch is not None}
        assert decoding <= set(plan.decode) <= decoding | {join.batch for join in plan.join}
        for number, count in plan.decode.items():
            members = [one for one in self.running if one.batch == number]
            left_out = [join for join in plan.join if join.batch == number]
            assert len(members) <= count <= len(members) + len(left_out)
        for group in plan.prefill:
            self._prefill(group)
        for number in plan.decode:
            self._decode(number, plan.draft.get(number))
        for score in plan.score:
            self._score(score.sequence, score.budget)
        self._finish_unstarted()
        if self._read() != self.files:
            self.files = self._read()
            self._events += self.weigh(self.other)
        return self._events

    def _read(self) -> dict[int, int]:
        """Bytes read from disk for each waiting sequence: twice those of its prefix."""
        waiting = (one for one in self.sequences.values() if one.on_disk)
        return {one.number: 2 * self.limits.cost.of(one.on_disk) for one in waiting}

    def _preempt(self, one: FakeSequence, entry: int | None) -> None:
        assert one.kv is not None
        if entry is not None:
            self._keep(one, entry)
        if one.pending and not one.first_delivered:
            self._deliver(one)
        one.reset()

    def _leave(self, number: int, entry: int | None) -> None:
        one = self.sequences.pop(number)
        assert number in self.ended, "only what is over leaves"
        self.texts.append(tuple(one.content))
        if entry is not None:
            self._keep(one, entry)

    def _keep(self, one: FakeSequence, entry: int) -> None:
        assert entry not in self._numbers, "a number of an entry is used once"
        self._numbers.add(entry)
        if one.kv is None or self.dice.random() < self.faults.unstored:
            self._events.append(NotStored(entry))
            return
        stored = self.entries[entry] = self._entry_of(one)
        self._storing.add(entry)
        places = None if stored.anywhere else tuple(sorted({*stored.snapshots, len(one.kv)}))
        after = tuple(one.kv[len(one.arrived.tokens) :])
        self._events.append(Stored(entry, len(one.kv), after, stored.nbytes, places))

    def _start(self, start: Start) -> None:
        one = self.sequences[start.sequence]
        assert one.kv is None
        assert one.number not in self.ended
        assert list(start.tokens) == [*one.arrived.tokens, *one.generated]
        assert 1 <= start.width <= one.arrived.width
        one.width, one.known = start.width, len(start.tokens)
        one.kv, one.started_short = [], False
        source = start.source
        if source is not None:
            one.kv = self._from(one, start, source)
            one.snapshots = {place for place in start.snapshots if place <= len(one.kv)}
            short = 1.0 if source.kind == "disk" else 0.3
            if self.dice.random() < short * self.faults.short_start:
                one.kv, one.snapshots, one.started_short = [], set(), True
        one.on_disk = 0  # what a file gave is used, or dropped
        if self._fails(one):
            return
        self._events.append(Started(one.number, len(one.kv)))

    def _from(self, one: FakeSequence, start: Start, source: Source) -> list[int]:
        length = source.length
        assert not one.arrived.fresh
        assert 0 < length < len(one.arrived.tokens), "the last token gives the logits"
        if source.kind == "disk":
            assert one.on_disk == length, "a file serves once"
            assert not start.snapshots
            return one.content[:length]
        assert not any(begin < length < end for begin, end in one.arrived.spans), "an image is cut"
        if source.kind == "entry":
            assert source.number not in self._storing
            entry = self.entries[source.number]
            if source.move:
                del self.entries[source.number]
        else:
            other = self.sequences[source.number]
            if other.kv is None or other.started_short:
                one.started_short = True  # it failed in this step: its KV is not there
                return []
            assert other.width == 1, "rows of candidates are no prefix"
            entry = self._entry_of(other)
        assert length <= len(entry.kv), "so much is not there"
        assert list(entry.kv[:length]) == one.content[:length], "another text"
        for place in (length, *start.snapshots):
            assert 0 < place <= length
            assert place == length or place in entry.snapshots or entry.anywhere, "no snapshot"
        assert entry.serves(length), "no snapshot"
        return list(entry.kv[:length])

    def _entry_of(self, one: FakeSequence) -> FakeEntry:
        """The entry with its KV."""
        assert one.kv is not None
        kept = frozenset(one.snapshots)
        anywhere = self.limits.trims or len(one.kv) <= WINDOW
        nbytes = self.limits.cost.of(len(one.kv)) + sum(map(self.limits.cost.snapshot, kept))
        return FakeEntry(tuple(one.kv), kept, anywhere, nbytes)

    def _join(self, number: int, batch: int) -> None:
        one = self.sequences[number]
        assert one.arrived.joins
        assert one.batch is None
        if one.kv is None or one.started_short:
            return
        assert len(one.kv) == one.known, "it joins before it is prefilled"
        one.batch, one.pending = batch, True

    def _prefill(self, group: tuple[Prefill, ...]) -> None:
        width = max(part.end - part.start for part in group)
        assert len({part.sequence for part in group}) == len(group)
        assert len(group) == 1 or self.limits.together
        ends = [part.end for part in group]
        assert max(ends) - min(ends) <= UNEVEN, "its KV is copied into rows of the longest"
        self._formed += 1
        for part in group:
            one = self.sequences[part.sequence]
            assert one.batch is None
            assert len(group) == 1 or not one.arrived.alone
            if one.kv is None or one.started_short:
                continue  # the pass runs without it
            one.group = self._formed if len(group) > 1 else 0
            assert len(one.kv) == part.start < part.end <= one.target
            end = part.end
            whole = one.arrived.spans if one.arrived.whole else ()
            assert not any(first < end < stop for first, stop in whole), "a pass cuts an image"
            if len(group) == 1 and self.dice.random() < self.faults.short_prefill:
                end = self.dice.randint(part.start, part.end)
                end = next((first for first, stop in whole if first < end < stop), end)
            one.kv = one.content[:end]
            if self._fails(one):
                continue
            if end > part.start:
                kept = part.snapshot and end == part.end
                if kept:
                    one.snapshots.add(end)
                self._events.append(Prefilled(one.number, end, kept))
            if end == one.target and one.arrived.joins and self.dice.random() < 0.5:
                self._deliver(one)
                one.first_delivered = True
        seconds = PASS_SECONDS + width * len(group) * PREFILL_SECONDS
        self.seconds += seconds
        self._events.append(PrefillTimed(width * len(group), seconds))

    def _decode(self, number: int, planned: int | None) -> None:
        width = planned or 0
        members = [one for one in self.running if one.batch == number]
        self.seconds += DECODE_SECONDS
        self._events.append(DecodeTimed(DECODE_SECONDS))
        if self.dice.random() < self.faults.lost + self.faults.failed:
            lost = self.dice.random() * (self.faults.lost + self.faults.failed) < self.faults.lost
            for one in members:
                self._break(one, lost=lost)
            return
        for one in members:
            if one.number % 8 == 0:  # it has a grammar
                seconds = self.dice.choice([0.1, 1, 8]) * DECODE_SECONDS
                self._events.append(Masked(one.number, seconds))
        ahead = self.dice.choice([1, 2, 30])
        right = tuple(min(width, ahead - 1) for _ in members)
        longest = max(len(one.content) for one in members)
        proposed = width * len(members)
        if planned is not None:
            guessed = Drafted(len(members), longest, width, proposed, right, DECODE_SECONDS)
            self._events.append(guessed)
        for one in members:
            assert one.kv is not None
            fed = [*one.content, one.sampled(len(one.generated))]
            one.kv.append(fed[len(one.kv)])
            for _ in range(ahead - one.first_delivered):
                if one.number not in self.ended:
                    self._deliver(one)
            one.first_delivered = False
            one.kv = one.content

    def _deliver(self, one: FakeSequence) -> None:
        if one.number in self.ended:
            return
        token = one.sampled(len(one.generated))
        one.generated.append(token)
        self._events.append(Generated({one.number: (token,)}))
        if len(one.generated) >= min(one.ends_at, one.arrived.limit):
            self.end(one.number, "finished")
            self._events.append(Ended(one.number))

    def _score(self, number: int, budget: int) -> None:
        one = self.sequences[number]
        assert one.arrived.scores
        assert budget > 0
        if one.kv is None or one.started_short or one.number in self.ended:
            return
        assert len(one.kv) >= len(one.arrived.tokens) - 1
        if len(one.kv) < len(one.arrived.tokens):
            one.kv = one.content
            self._events.append(Prefilled(number, len(one.kv)))
        one.scores_left -= 1
        self.seconds += budget * PREFILL_SECONDS
        self._events.append(PrefillTimed(budget, budget * PREFILL_SECONDS))

    def _finish_unstarted(self) -> None:
        for one in self.running:
            if one.arrived.joins or one.number in self.ended:
                continue
            whole = one.kv is not None and len(one.kv) >= len(one.arrived.tokens) - 1
            if whole and not (one.arrived.scores and one.scores_left > 0):
                self.end(one.number, "finished")
                self._events.append(Ended(one.number))

    def _fails(self, one: FakeSequence) -> bool:
        if self.dice.random() < self.faults.lost:
            self._break(one, lost=True)
            return True
        if self.dice.random() < self.faults.failed:
            self._break(one, lost=False)
            return True
        return False

    def _break(self, one: FakeSequence, *, lost: bool) -> None:
        one.reset()
        if one.number in self.ended:
            return
        if lost:
            self._events += [MemoryShort(), Lost(one.number)]
        else:
            self.end(one.number, "failed")
            self._events.append(Ended(one.number, failed=True))

    def weigh(self, nbytes: int, features: int | None = None) -> list[PlannerEvent]:
        self.other = nbytes
        self.features = self.features if features is None else features
        return [OtherBytes(nbytes, self.features, sum(self.files.values()), self.lacking)]
