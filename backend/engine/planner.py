"""Decides what the engine does next: who is admitted, prefilled, preempted, stored and evicted.

Plain Python without MLX. Clock, byte counts, arrivals and results are arguments, so the same
events always give the same plans: a simulator can replay them, and a property test can check
every step. The executor (`backend.engine.executor`) carries the plans out and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from backend.engine.guess_width import GuessWidth
from backend.engine.mask_share import MaskShare
from backend.engine.plan import (
    Arrived,
    DecodeTimed,
    Ended,
    Generated,
    Guessed,
    Join,
    Leave,
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
    Refusal,
    Score,
    Source,
    Start,
    Started,
    StepPlan,
    Stored,
)
from backend.engine.prefill import PASS_TOKENS, SMALLEST_STEP, Pace
from backend.engine.prefix_index import Match, PrefixIndex
from backend.engine.snapshot_places import LEAST_STORED, snapshot_places

AHEAD = 512  # tokens of output that a sequence is charged for before it generates them
_PATIENCE = 10.0  # seconds after which a sequence that does not fit holds up those behind it
_PREFILL_SHARE = 0.75  # most of the device's time that prefill takes while sequences decode
_UNEVEN = 1024  # tokens by which the sequences of a batch may differ, whatever the padding costs
_WASTE = 0.25  # of a batch's bytes that may be padding
_REST = 1.5  # times the usual length of a step, where that leaves nothing to be prefilled
_MOST_BATCHES = 4
_MOST_SNAPSHOTS = 16
_FEW_SNAPSHOTS = 3  # that a short prompt may have though they outweigh its tokens
_SNAPSHOT_SHARE = 8  # the snapshots of one sequence take at most this part of the prompt cache
_MIN_RATE = 50.0  # tokens per second that ageing assumes until a prefill pass was timed


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
    def wanted_snapshots(self) -> int:
        """How many are still to be taken."""
        return sum(place > self.filled for place in self.places - self.snapshots)

    def uncut(self, length: int) -> int:
        """The longest prefix of at most `length` tokens that cuts through no image or sound."""
        for start, stop in self.arrived.spans:
            if start < length < stop:
                return start
        return length


class Planner:
    """The decisions for one loaded model.

    index: which stored entries serve a prompt. widths: how many guesses pay. masks: whose grammars
    are too costly. unstored: sequences
    whose KV was larger than the whole prompt cache. preemptions: how many sequences lost their
    place to memory.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pace = Pace(limits.prefill_chunk, limits.stall_ms)
        self.index = PrefixIndex(limits.prompt_cache, limits.max_entries)
        self.widths = GuessWidth(limits.guesses)
        self.masks = MaskShare(limits.stall_ms / 1e3)
        self.sequences: dict[int, SequenceState] = {}
        self._admitted: dict[int, SequenceState] = {}  # in the order of admission
        self.unstored = 0
        self.preemptions = 0
        self._leaving: list[Leave] = []
        self._storing: dict[int, tuple[SequenceState, int]] = {}
        self._evicting: list[int] = []
        self._copied: set[int] = set()  # entries that the plan at hand copies, so they stay
        self._entries = 0
        self._steps = 0
        self._batches = 0
        self._formed = 0  # groups of sequences that share passes
        self._other = 0
        self._features = 0
        self._owed_to_decode = 0.0  # seconds
        self._step_seconds = 0.0  # of the latest decode step
        self._scored = False  # in the latest step that had time for prefill
        self._shortest_next = False  # where a step is too small for two prompts

    @property
    def busy(self) -> bool:
        return bool(self.sequences or self._leaving or self._storing or self._evicting)

    def of(self, state: str) -> list[SequenceState]:
        """The sequences in a state: `waiting` by arrival, the others by admission."""
        among = self.sequences if state == "waiting" else self._admitted
        return [one for one in among.values() if one.state == state]

    @property
    def admitted(self) -> list[SequenceState]:
        """By admission."""
        return list(self._admitted.values())

    def plan(self, now: float, events: Iterable[PlannerEvent]) -> StepPlan:
        """Learn from what happened since the last plan, and decide the next step.

        now: seconds on any clock that only moves forward.
        """
        for event in events:
            self._learn(event, now)
        self._steps += 1
        self._copied.clear()
        preempt, refuse = self._make_room()
        preempt += self._rest_masks()
        start, unfit = self._admit(now)
        refuse += unfit
        join = self._join()
        decode = {number: len(members) for number, members in sorted(self._members().items())}
        left = self._room - self._used() + self._least_pass() - self._storing_bytes()
        prefill, score, computing = self._prefill(now, left, running=bool(decode))
        left -= max(computing, self._least_pass())
        self._shrink(left)
        features = self._shrink_features(left - self.index.nbytes)
        guess = self._guess(left - self.index.nbytes - self._features)
        leave, self._leaving = self._leaving, []
        evict, self._evicting = self._evicting, []
        return StepPlan(
            number=self._steps,
            features=features,
            evict=tuple(evict),
            preempt=tuple(preempt),
            leave=tuple(leave),
            refuse=tuple(refuse),
            start=tuple(start),
            join=tuple(join),
            decode=decode,
            guess=guess,
            prefill=tuple(prefill),
            score=tuple(score),
        )

    @property
    def spare(self) -> int:
        """Bytes that nobody has, and that are kept for nobody."""
        entries = self.index.nbytes + self._storing_bytes()
        return self._room - self._used() - entries - self._features

    def forget_entries(self) -> None:
        """Evict every stored entry in the next step."""
        self._evict(self.index.clear())

    # What it learns.

    def _learn(self, event: PlannerEvent, now: float) -> None:
        match event:
            case Generated(number, tokens):
                if one := self.sequences.get(number):
                    one.generated += tokens
            case Arrived():
                self.sequences[event.sequence] = SequenceState(
                    event, now, event.width, on_disk=event.on_disk
                )
            case Started(number, reused):
                if one := self.sequences.get(number):
                    self._started(one, reused)
            case Prefilled(number, filled, snapshot):
                if one := self.sequences.get(number):
                    one.filled = filled
                    if snapshot:
                        one.snapshots.add(filled)
            case Ended(number, failed):
                if one := self.sequences.pop(number, None):
                    self._ended(one, failed=failed)
            case Lost(number):
                if one := self.sequences.get(number):
                    self._back_to_waiting(one)
            case Stored():
                self._stored(event)
            case NotStored(entry):
                self._storing.pop(entry, None)
            case PrefillTimed(tokens, seconds, behind):
                self.pace.measured(tokens, seconds, behind)
                self._owed_to_decode += seconds * (1 - _PREFILL_SHARE) / _PREFILL_SHARE
            case DecodeTimed(seconds):
                self._step_seconds = seconds
                self.masks.decoded(seconds)
                self._owed_to_decode = max(self._owed_to_decode - seconds, 0.0)
            case Masked(number, seconds):
                self.masks.masked(seconds)
                if one := self.sequences.get(number):
                    one.mask_seconds = seconds
            case Guessed(rows, longest, width, proposed, right, seconds):
                self.widths.learn(rows, longest, width, proposed, right, seconds)
            case OtherBytes(nbytes, features):
                self._other, self._features = nbytes, features
            case MemoryShort():
                self.forget_entries()

    def _started(self, one: SequenceState, reused: int) -> None:
        """The executor may have found less than was planned: a file that is gone, for example.

        It then left out what the same plan had for the sequence, so that is planned again.
        """
        one.filled = reused
        one.snapshots = {place for place in one.snapshots if place <= reused}

    def _ended(self, one: SequenceState, *, failed: bool) -> None:
        self._admitted.pop(one.number, None)
        filled = 0 if failed else self._storable(one)
        entry = self._entry_for(one, filled) if filled else None
        for other in self.sequences.values():
            other.shared.pop(one.number, None)
        self._leaving.append(Leave(one.number, entry))

    def _storable(self, one: SequenceState) -> int:
        """How many tokens an entry of what a sequence has computed would hold; 0: not worth it."""
        if one.state == "waiting" or not one.arrived.keep:
            return 0
        filled = one.total if one.state == "decode" else one.filled
        return filled if filled >= LEAST_STORED else 0

    def _entry_for(self, one: SequenceState, filled: int) -> int | None:
        """A number for what the sequence has in its KV, if that is worth storing."""
        if not self.limits.prompt_cache:
            return None
        if self.limits.cost.of(filled) > self.limits.prompt_cache:
            self.unstored += 1
            return None
        if filled <= one.prompt:
            known = self.index.covers(one.arrived.key.prefix(filled), trimmable=self.limits.trims)
            if known is not None:
                self.index.touch(known)
                return None
        self._entries += 1
        self._storing[self._entries] = (one, filled)
        return self._entries

    def _stored(self, event: Stored) -> None:
        one, _ = self._storing.pop(event.entry)
        key = one.arrived.key
        key = key.prefix(event.length) if event.length <= len(key) else key.extended(event.after)
        if event.nbytes > self.limits.prompt_cache:
            self.unstored += 1
            self._evicting.append(event.entry)
            return
        self._evict(self.index.add(event.entry, key, event.nbytes, places=event.places))
        for other in self.of("waiting"):
            if other.match is not None and other.arrived.key.shared(key) > other.match.length:
                other.match = None

    def _back_to_waiting(self, one: SequenceState) -> None:
        one.state, one.filled, one.group, one.known = "waiting", 0, 0, 0
        one.preempted_in = self._steps
        one.least = SMALLEST_STEP
        self._admitted.pop(one.number, None)
        one.snapshots.clear()
        one.match = None

    # Memory.

    def _used(self) -> int:
        """Bytes that the admitted sequences are charged for."""
        used = sum(map(self._rectangle, (*self._groups(), *self._members().values())))
        used += sum(one.arrived.beside for one in self._admitted.values())
        return used + self._snapshot_bytes() + self._least_pass()

    def _rectangle(self, members: Collection[SequenceState]) -> int:
        """Bytes of sequences whose KV lies side by side: each takes as much as the longest."""
        return sum(one.width for one in members) * self._row(max(one.charged for one in members))

    def _groups(self) -> list[list[SequenceState]]:
        """The sequences in prefill, those together that shared their latest pass."""
        groups: dict[int, list[SequenceState]] = {}
        for one in self.of("prefill"):
            groups.setdefault(one.group or -one.number, []).append(one)
        return list(groups.values())

    def _row(self, tokens: int) -> int:
        """Bytes of a row of so many tokens: its KV, also a draft model's, and what a decode step
        computes with for it."""
        draft = self.limits.draft.of(tokens) if self.limits.draft else 0
        return self.limits.cost.of(tokens) + draft + self.limits.passes.chosen(1, tokens)

    def _least_pass(self) -> int:
        """Bytes that every sequence in prefill needs to get on, one after the other."""
        return max(map(self._smallest_pass, self.of("prefill")), default=0)

    def _smallest_pass(self, one: SequenceState) -> int:
        tokens = max(min(one.least, one.target - one.filled), self._side_by_side(one))
        return self._pass(one, tokens, one.charged if one.arrived.scores else one.total)

    def _side_by_side(self, one: SequenceState) -> int:
        """The fewest tokens of a pass: one of each row."""
        return max(one.width - 1, 1) if one.arrived.scores else 1

    def _pass(self, one: SequenceState, tokens: int, seen: int, rows: int = 1) -> int:
        """Bytes of a pass of rows like this one, over so many tokens of each.

        An image or a sound is encoded in a pass of its own, which a pass that needs it waits for.
        """
        nbytes = self.limits.passes.of(rows * tokens, seen)
        if one.arrived.scores or one.arrived.fresh:
            nbytes += rows * tokens * self.limits.passes.per_choice
        reads = any(one.filled < stop for _, stop in one.arrived.spans)
        return max(nbytes, one.arrived.encodes if reads else 0)

    def _snapshot_bytes(self) -> int:
        """Bytes of the snapshots that the admitted sequences have, or are to get."""
        if self.limits.trims:
            return 0
        return sum(
            (len(one.snapshots) + one.wanted_snapshots) * self.limits.cost.snapshot(one.prompt)
            for one in self._admitted.values()
        )

    def _storing_bytes(self) -> int:
        """Bytes that are about to be entries. They make nobody yield: entries yield to them."""
        cost = self.limits.cost
        return sum(
            cost.of(filled) + len(one.snapshots) * cost.snapshot(one.prompt)
            for one, filled in self._storing.values()
        )

    def _members(self) -> dict[int, list[SequenceState]]:
        members: dict[int, list[SequenceState]] = {}
        for one in self.of("decode"):
            members.setdefault(one.batch, []).append(one)
        return members

    @property
    def _room(self) -> int:
        return self.limits.room - self._other

    def _make_room(self) -> tuple[list[Leave], list[Refusal]]:
        """Preempt the newest until the others fit; evict stored entries that they need.

        What the preempted have computed is stored where there is room for it beside the others.
        The last one stays where only bytes that will soon be gone crowd it.
        """
        computed: list[tuple[SequenceState, int]] = []
        refused: list[Refusal] = []
        while (used := self._used()) > self._room and (admitted := self.admitted):
            one = admitted[-1]
            if len(admitted) == 1:
                if used <= self.limits.room:
                    break
                if one.least > 1:
                    one.least = 1
                    continue
                if used - self._snapshot_bytes() > self.limits.room:
                    refused.append(self._refuse(one, used))
                    continue
            computed.append((one, self._storable(one)))
            self._back_to_waiting(one)
            self.preemptions += 1
        preempted: list[Leave] = []
        left = self._room - used - self._storing_bytes()
        for one, filled in reversed(computed):
            size = self.limits.cost.of(filled)
            entry = self._entry_for(one, filled) if filled and size <= left else None
            left -= size if entry is not None else 0
            preempted.append(Leave(one.number, entry))
        self._shrink(left)
        return preempted, refused

    def _rest_masks(self) -> list[Leave]:
        """Preempt the sequences whose grammars are too costly for the others.

        A sequence that rests keeps its KV as an entry, and starts again once the others have made
        up for the time that its grammar took.
        """
        if not self.limits.prompt_cache:
            return []
        seconds = {one.number: one.mask_seconds for one in self.of("decode")}
        resting = [self.sequences[number] for number in self.masks.too_costly(seconds)]
        leaving: list[Leave] = []
        for one in resting:
            filled = self._storable(one)
            leaving.append(Leave(one.number, self._entry_for(one, filled) if filled else None))
            self._back_to_waiting(one)
            one.resting = True
        return leaving

    def _rests(self, one: SequenceState) -> bool:
        return one.resting and self.masks.owed > 0 and bool(self._admitted)

    def _refuse(self, one: SequenceState, needed: int) -> Refusal:
        del self.sequences[one.number]
        self._admitted.pop(one.number, None)
        self._leaving.append(Leave(one.number))
        return Refusal(one.number, needed, self.limits.room, one.total)

    def _crowded(self, left: int) -> bool:
        """Whether what this plan copies has to go before so many bytes are left."""
        return self._copied_bytes() > max(left, 0)

    def _copied_bytes(self) -> int:
        return sum(map(self.index.size, self._copied))

    def _shrink(self, room: int, *pinned: int) -> None:
        most = max(min(room - self._features, self.limits.prompt_cache), 0)
        if self.index.nbytes > most:
            self._evict(self.index.shrink(most, {*pinned, *self._copied}))

    def _shrink_features(self, left: int) -> int | None:
        """How many of the bytes that are left features may keep; None: no change."""
        if self._features <= max(left, 0):
            return None
        self._features = max(left, 0)
        return self._features

    def _evict(self, entries: Collection[int]) -> None:
        self._evicting += entries
        self._unmatch(entries)

    def _unmatch(self, entries: Collection[int]) -> None:
        """Look anew for what these entries would have served; other matches stay the best."""
        for one in self.of("waiting") if entries else ():
            if one.match is not None and one.match.entry in entries:
                one.match = None

    # Admission.

    def _admit(self, now: float) -> tuple[list[Start], list[Refusal]]:
        starts: list[Start] = []
        refused: list[Refusal] = []
        expecting = 0  # sequences that wait for a prefix in prefill and keep a slot
        slots = self.limits.slots - len(self._admitted)
        if slots <= 0:
            return starts, refused
        storing = self._storing_bytes()
        used = self._used() + storing
        if self._admitted and used + 2 * self.limits.cost.of(1) > self._room:
            return starts, refused  # not even the shortest fits, with the copy while it joins
        waiting = [
            one
            for one in self.of("waiting")
            if one.preempted_in != self._steps and not self._rests(one)
        ]
        urgent = {one.number: self._urgency(one, now) for one in waiting}
        waiting.sort(key=lambda one: (urgent[one.number], one.number))
        if self._gathers(waiting, slots):
            return starts, refused
        for one in waiting:
            if len(starts) + expecting >= slots:
                break
            if self._rests(one):
                continue  # another one has just started
            # Memory comes first because it is asked quickly: in a long queue, most do not fit.
            one.width = one.arrived.width
            needed = used + self._charge(one)
            if needed > self._room and one.width <= 2 and (self._admitted or storing):
                if now - one.since > _PATIENCE:
                    break
                continue
            source = self._source(one)
            if self._expects(one, source):
                expecting += 1
                continue
            while needed > self._room and one.width > 2:
                one.width = 1 + (one.width - 1) // 2
                needed = used + self._charge(one)
            if needed > self._room and not (self._admitted or storing):
                one.least = 1
                needed = used + self._charge(one)
            if needed > self._room:
                if not (self._admitted or storing):
                    if needed > self.limits.room:
                        refused.append(self._refuse(one, needed))
                elif now - one.since > _PATIENCE:
                    break
                continue
            if self._crowded(self._room - needed):
                break
            starts.append(self._start(one, source, self._room - needed))
            if one.resting:
                one.resting = False
                self.masks.masked(one.mask_seconds)
            used = self._used() + storing
        return starts, refused

    def _gathers(self, waiting: Sequence[SequenceState], free: int) -> bool:
        """Whether to leave the free slots free until the next sequence ends.

        The prompts that start then share one pass, and a pass of few tokens takes about as long as
        one of PASS_TOKENS. That is worth it while more prompts wait than slots are free, and the
        free slots would generate less in the meantime than in the time of a pass.

        waiting: in the order in which they would start. free: slots.
        """
        speed = self.pace.tokens_per_second
        running = self.of("decode")
        if not (self.limits.together and speed and running) or len(waiting) <= free:
            return False
        if len(running) < len(self._admitted):
            return False  # the pass of one in prefill can be shared now
        steps = min(one.arrived.limit - len(one.generated) for one in running)
        if steps * self._step_seconds * free / self.limits.slots >= PASS_TOKENS / speed:
            return False
        return all(
            one.target - self._match(one).length < PASS_TOKENS for one in waiting[: free + 1]
        )

    def _urgency(self, one: SequenceState, now: float) -> float:
        """Tokens left to prefill, less those of the time that it has waited: smallest first.

        Shortest first keeps short questions quick; ageing keeps a long prompt from starving: once
        it has waited for twice its own time, nothing newer overtakes it.
        """
        rate = max(self.pace.tokens_per_second or _MIN_RATE, _MIN_RATE) / 2
        known = one.filled if one.state == "prefill" else self._match(one).length
        return max(one.target - known, 0) - rate * (now - one.since)

    def _charge(self, one: SequenceState) -> int:
        """Bytes for one more sequence: its own, a copy while it joins, and its smallest pass."""
        copied = self.limits.cost.of(one.total) if self._admitted else 0
        own = one.width * self._row(one.charged) + one.arrived.beside
        return own + copied + self._smallest_pass(one)

    def _match(self, one: SequenceState) -> Match:
        if one.match is None:
            one.match = self.index.find(one.arrived.key)
        return one.match

    def _source(self, one: SequenceState) -> Source | None:
        """The longest prefix that is computed already, wherever it is."""
        if one.arrived.fresh or not (self.limits.prompt_cache or one.on_disk):
            return None
        best: Source | None = None
        match = self._match(one)
        if match.entry is not None:
            length = one.uncut(match.length)
            if length == match.length or self.index.places(match.entry) is None:
                whole = length == self.index.length(match.entry)
                move = whole and self._only_user(one, match.entry)
                best = Source("entry", match.entry, length, move)
        for other in self._admitted.values() if self.limits.prompt_cache else ():
            length = self._served_by(one, other)
            if length > (best.length if best else 0):
                best = Source("sequence", other.number, length)
        if one.on_disk > (best.length if best else 0):
            best = Source("disk", 0, one.on_disk)
        return best if best is not None and best.length > 0 else None

    def _only_user(self, one: SequenceState, entry: int) -> bool:
        """Whether the entry may be moved: what continues it is stored and serves as much, and
        nobody else waits for it."""
        if not one.arrived.keep or self.index.places(entry) is not None:
            return False
        return not any(
            other is not one and self._match(other).entry == entry for other in self.of("waiting")
        )

    def _shared(self, one: SequenceState, other: SequenceState) -> int:
        if other.number not in one.shared:
            length = min(one.arrived.key.shared(other.arrived.key), one.prompt - 1)
            one.shared[other.number] = one.uncut(length)
        return one.shared[other.number]

    def _served_by(self, one: SequenceState, other: SequenceState) -> int:
        """Tokens of a running sequence's KV that can be copied for another one."""
        if other.width > 1:
            return 0
        filled = other.filled if other.state == "prefill" else other.prompt
        shared = min(self._shared(one, other), filled)
        if self.limits.trims:
            return one.uncut(shared)
        return max((place for place in other.snapshots if place <= shared), default=0)

    def _expects(self, one: SequenceState, source: Source | None) -> bool:
        """Whether it is better off once what both begin with is computed, or stored."""
        if one.arrived.fresh or one.generated or not self.limits.prompt_cache:
            return False
        for other in self.of("prefill"):
            length = min(self._shared(one, other), other.target)
            if other.filled >= length or other.width > 1:
                continue
            own = source is not None and source.kind == "sequence" and source.number == other.number
            if length < PASS_TOKENS + (0 if source is None or own else source.length):
                continue
            if not self.limits.trims:
                other.places.add(length)
            return True
        known = source.length if source else 0
        # What is being stored is there after one step, so few tokens are worth the wait.
        return any(
            self._served_after(one, other, filled) >= known + LEAST_STORED
            for other, filled in self._storing.values()
        )

    def _served_after(self, one: SequenceState, other: SequenceState, filled: int) -> int:
        """Tokens that a sequence which is being stored will serve from the next step on."""
        shared = min(self._shared(one, other), filled)
        if self.limits.trims:
            return shared
        return max((place for place in other.snapshots if place <= shared), default=0)

    def _start(self, one: SequenceState, source: Source | None, left: int) -> Start:
        """Admit a sequence. left: bytes beside all that is admitted then."""
        if source is not None and source.kind == "entry":
            self._shrink(left, source.number)
            if self.index.nbytes > max(left, 0) and not source.move:
                # The entry and its copy do not fit side by side.
                if self.index.places(source.number) is None:
                    source = Source("entry", source.number, source.length, move=True)
                else:
                    self._shrink(0)
                    source = None
        else:
            self._shrink(left)
        one.filled = source.length if source else 0
        known = self._places_in(source)
        if source is not None and source.kind == "entry":
            if source.move:
                self._copied.discard(source.number)
                self.index.remove(source.number)
                self._unmatch((source.number,))
            else:
                self._copied.add(source.number)
                self.index.touch(source.number)
        if not self.limits.trims:
            self._choose_snapshots(one, known, left)
        one.state, one.on_disk, one.known = "prefill", 0, one.total
        self._admitted[one.number] = one
        tokens = (*one.arrived.tokens, *one.generated)
        return Start(one.number, tokens, source, one.width, tuple(sorted(one.snapshots)))

    def _choose_snapshots(
        self, one: SequenceState, known: Collection[int] | None, left: int
    ) -> None:
        """Which snapshots are taken, and which come along with the prefix.

        known: the lengths at which its source can be cut; None: at any.

        No more than fit in the bytes that are left, than a bounded part of the prompt cache, and
        than weigh as much as the KV of the prompt, beside a few.
        """
        cost = self.limits.cost
        size = max(cost.snapshot(one.prompt), 1)
        fair = one.prompt * cost.per_token // size + _FEW_SNAPSHOTS
        if not cost.per_token:
            fair = _MOST_SNAPSHOTS  # state alone: there is nothing else that could be kept
        share = max(self.limits.prompt_cache // _SNAPSHOT_SHARE // size, 1)
        spare = max(left - sum(map(self.index.size, self._copied)), 0) // size
        most = min(fair, share, spare, _MOST_SNAPSHOTS)
        one.places, one.snapshots = set(), set()
        if self.limits.prompt_cache and one.arrived.keep:
            last, shared = one.prompt - 1, self._match(one).shared
            expected = [*one.arrived.places[:1], last, shared, *one.arrived.places[1:]]
            one.places, one.snapshots = snapshot_places(
                expected, known, one.filled, last, most, one.uncut
            )
        self._shrink(left - (len(one.snapshots) + one.wanted_snapshots) * size)

    def _places_in(self, source: Source | None) -> Collection[int] | None:
        """The lengths at which a source has snapshots; None: it can be cut back to any."""
        if source is None or source.kind == "disk":
            return ()
        if source.kind == "sequence":
            return self.sequences[source.number].snapshots
        return self.index.places(source.number)

    # Prefill and decode.

    def _join(self) -> list[Join]:
        joins: list[Join] = []
        for one in self.of("prefill"):
            if one.arrived.joins and one.filled >= one.target:
                one.batch = self._batch_for(one)
                one.state = "decode"
                joins.append(Join(one.number, one.batch))
        if joins:
            self._shrink(self._room - self._used())
        return joins

    def _batch_for(self, one: SequenceState) -> int:
        """A batch in which the padding stays small, or a new one.

        A batch is a rectangle: every sequence takes as much memory as the longest.
        """
        left = self._room - self._used() - self._copied_bytes() + self._row(one.charged)
        padding: dict[int, float] = {}
        batches = self._members()
        for number, members in batches.items():
            lengths = [member.charged for member in (*members, one)]
            whole = len(lengths) * self._row(max(lengths))
            if whole - len(members) * self._row(max(lengths[:-1])) > left:
                continue  # The padding would cost somebody its place.
            wasted = 1 - sum(map(self._row, lengths)) / max(whole, 1)
            uneven = max(lengths) - min(lengths)
            padding[number] = 0.0 if uneven <= _UNEVEN else wasted
        if padding:
            best = min(padding, key=lambda number: (padding[number], number))
            if padding[best] <= _WASTE or len(batches) >= _MOST_BATCHES:
                return best
        self._batches += 1
        return self._batches

    def _guess(self, left: int) -> dict[int, int]:
        """How many guesses each batch may check, within the bytes that are left."""
        widths: dict[int, int] = {}
        for number, members in sorted(self._members().items()):
            if len(members) > 1 and not self.limits.together:
                continue  # several tokens of several sequences in a pass: the model cannot
            most = min(max(one.arrived.guesses for one in members), self.limits.guesses)
            longest = max(one.total for one in members)
            while most and self.limits.passes.chosen(len(members) * most, longest) > left:
                most //= 2
            if most and (width := self.widths.choose(len(members), longest, most)):
                widths[number] = width
                left -= self.limits.passes.chosen(len(members) * width, longest)
        return widths

    def _prefill(
        self, now: float, room: int, *, running: bool
    ) -> tuple[list[tuple[Prefill, ...]], list[Score], int]:
        """The prefill passes of this step, within the pause that running streams may feel.

        room: bytes beside the admitted sequences. Returns what the passes take of them as well:
        they may be in MLX's queue together, so it adds up.
        """
        if not running:
            self._owed_to_decode = 0.0
        if self._owed_to_decode > 0:
            return [], [], 0
        filling = self.of("prefill")
        able = [one for one in filling if one.filled < one.target]
        if not (able and self._scored):  # Nobody knows how long scoring takes: they take turns.
            able += [one for one in filling if one.filled >= one.target and one.arrived.scores]
        order = sorted(able, key=lambda one: (self._urgency(one, now), one.number))
        self._scored = False
        pause = share = 1.0  # of what a step may take, what is left, and the first prompt's part
        if able and not running:
            # A small rest would be prefilled beside the others' decode steps, much later.
            rests = [one.target - one.filled for one in able]
            whole = self.pace.tokens(running=False, behind=max(one.filled for one in able))
            most = min(_REST * whole, self.limits.prefill_chunk)
            if whole < sum(rests) <= most:
                pause = min(len(rests) * max(rests), most) / whole
        shortest = min(order, key=lambda one: one.target - one.filled, default=None)
        if shortest is not None and shortest is not order[0]:
            # A long prompt that has waited for its turn leaves half to whoever needs least, or
            # every newcomer would wait until it is done.
            order.remove(shortest)
            share = 0.5
            self._shortest_next = not self._shortest_next
            half = self.pace.tokens(running=running, behind=order[0].filled) // 2
            first = half < PASS_TOKENS and self._shortest_next
            order.insert(0 if first else 1, shortest)
        passes: list[tuple[Prefill, ...]] = []
        scores: list[Score] = []
        most = left = room - self._copied_bytes()
        while order:
            one = order.pop(0)
            whole = self.pace.tokens(running=running, behind=one.filled)
            budget = round(pause * whole)
            if budget <= 0:
                break
            if one.filled >= one.target:
                if fitting := self._fitting(one, budget, left):
                    left -= self._pass(one, fitting, one.charged)
                    scores.append(Score(one.number, fitting))
                    self._scored = True
                break
            fitting = self._fitting(one, max(int(share * budget), SMALLEST_STEP), left)
            share = 1.0
            if fitting < (min(PASS_TOKENS, one.target - one.filled) if passes else 1):
                continue
            first_chunk = self._chunk(one, fitting)
            group = self._together(first_chunk, order, budget, left)
            together = {part.sequence for part in group}
            order = [other for other in order if other.number not in together]
            passes.append(tuple(group))
            pause -= max(_padded(group), PASS_TOKENS) / whole
            left -= self._group(group)
            self._formed += len(group) > 1
            for part in group:
                self.sequences[part.sequence].group = self._formed if len(group) > 1 else 0
        return passes, scores, most - left

    def _fitting(self, one: SequenceState, tokens: int, left: int) -> int:
        """How many of the tokens a pass may take that computes with so many bytes; 0: none."""
        seen = one.charged if one.arrived.scores else min(one.filled + tokens, one.target)
        least = self._side_by_side(one)
        if self._pass(one, least, seen) > left:
            return 0
        tokens = max(tokens, least)
        while self._pass(one, tokens, seen) > left:
            tokens = max(tokens // 2, least)
        return tokens

    def _group(self, group: Sequence[Prefill]) -> int:
        """Bytes of a pass, and of the padding that it brings to the KV of those that share it."""
        members = [self.sequences[part.sequence] for part in group]
        padding = self._rectangle(members) - sum(self._rectangle([one]) for one in members)
        sizes, ends = map(_size, group), map(_end, group)
        return self._pass(members[0], max(sizes), max(ends), len(group)) + padding

    def _together(
        self, first: Prefill, others: Sequence[SequenceState], budget: int, left: int
    ) -> list[Prefill]:
        """A stretch, with those of other prompts that share its pass at little padding.

        All take as long as the longest, so none may be more than twice as long as another.
        budget: tokens. left: bytes.
        """
        group = [first]
        if not self.limits.together or self.sequences[first.sequence].arrived.alone:
            return group
        parts = [
            self._chunk(other, budget)
            for other in others
            if not other.arrived.alone and other.filled < other.target
        ]
        for part in sorted(parts, key=_size):
            more = [*group, part]
            sizes = list(map(_size, more))
            ends = list(map(_end, more))
            # With little behind them, so many tokens take about as long as the first alone.
            free = PASS_TOKENS if max(ends) <= _UNEVEN else 0
            if max(sizes) > 2 * min(sizes) or _padded(more) > max(budget, free):
                continue
            if max(ends) - min(ends) > _UNEVEN:
                continue  # Its KV would be copied into rows of the longest.
            if self._group(more) <= left:
                group = more
        return group

    def _chunk(self, one: SequenceState, budget: int) -> Prefill:
        """The next stretch of a prompt. It ends where a snapshot is wanted."""
        end = min(one.filled + budget, one.target)
        end = min([end, *(place for place in one.places if place > one.filled)])
        return Prefill(one.number, one.filled, end, snapshot=end in one.places)


def _size(part: Prefill) -> int:
    return part.end - part.start


def _end(part: Prefill) -> int:
    return part.end


def _padded(group: Sequence[Prefill]) -> int:
    """Tokens that a pass computes, padding included."""
    return len(group) * max(map(_size, group))
