"""Decides which sequences are admitted, prefilled, preempted, stored and evicted in each step.

Times, byte counts, arrivals and results are arguments, so the same events always give the same
plans: a simulator can replay them, and a property test can check every step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from backend.engine.planning.burst import Burst
from backend.engine.planning.charges import Charges
from backend.engine.planning.checkpoint_positions import checkpoint_positions
from backend.engine.planning.draft_width import DraftWidth
from backend.engine.planning.mask_share import MaskShare
from backend.engine.planning.pace import SMALLEST_STEP, Pace
from backend.engine.planning.plan import (
    Arrived,
    DecodeTimed,
    Drafted,
    Ended,
    Generated,
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
    Source,
    Start,
    Started,
    StepPlan,
    Stored,
)
from backend.engine.planning.prefill_turns import UNEVEN, PrefillTurns
from backend.engine.planning.sequence_state import SequenceState, SequenceTable
from backend.engine.planning.stored_entries import StoredEntries
from backend.engine.planning.text_turn import TextTurn

# A sequence that does not fit for this many seconds blocks the admission of less urgent sequences.
_PATIENCE = 10.0
# A disk counts as hanging after these seconds, plus the time of writing the data at this speed.
_DISK_PATIENCE = 60.0
_DISK_SPEED = 10 << 20  # bytes per second
# maximum share of a batch's bytes that may be padding, and of its rows that may be unused
_WASTE = 0.25
_MOST_BATCHES = 4
_MOST_SNAPSHOTS = 16
_FEW_SNAPSHOTS = 3  # a prompt may have this many, even if they need more bytes than its KV
# The snapshots of one sequence use at most 1/_SNAPSHOT_SHARE of the prompt cache.
_SNAPSHOT_SHARE = 8
_MOST_AHEAD = 3  # maximum number of steps in a row that run ahead (see `_runs_ahead`)


class Planner:
    """Plans the steps of one loaded model.

    pace: decides how long a prefill pass may be. An argument replaces the initial pace, if passes
        were timed before.
    preemptions: number of sequences that were preempted to free memory.
    unused: bytes that the latest plan charges to no sequence. KV may be read from a file into this
        memory, because cached prefixes are evicted for it.
    free_for_texts: bytes that texts to embed may use beside the latest plan.
    """

    def __init__(self, limits: Limits, pace: Pace | None = None) -> None:
        self.limits = limits
        self.pace = pace or Pace(limits.prefill_chunk, limits.stall_ms)
        self.sequences = SequenceTable()
        self._charges = Charges(limits)
        self.entries = StoredEntries(limits, self._charges, self.sequences, self.pace)
        self._turns = PrefillTurns(limits, self._charges, self.pace)
        self._burst = Burst(self.pace)
        self.widths = DraftWidth(limits.draft_tokens)
        self.masks = MaskShare(limits.stall_ms / 1e3)
        self._texts = TextTurn(self.sequences, self._charges, self.pace)
        self.preemptions = 0
        self.unused = self.free_for_texts = limits.budget
        self._arrived: list[int] = []  # since the latest plan
        self._leaving: list[Leave] = []
        self._steps = 0
        self._batches = 0
        self._other = 0  # bytes of KV that is being written to disk
        self._written_at = 0.0  # when `_other` last changed
        self._disk_hangs = False
        self._read = 0  # bytes of KV that was read from disk for sequences that have not started
        self._files = 0  # how many of the bytes of `_read` count as used now
        self._unread: list[int] = []  # sequences whose KV from disk is dropped in this step
        self._features = 0  # bytes of cached features of images and audio
        self._step_seconds = 0.0  # duration of the latest decode step
        self._claim = 0  # bytes that sequences leave free for texts to embed, in a turn of these
        self._depths: dict[int, int] = {}  # rows of each batch's KV, after the latest plan
        self._latest, self._latest_limits = StepPlan(0), limits  # the latest plan, and its limits
        # The latest plan stays valid until a sequence has grown by more tokens than this; below 0,
        # a new plan is needed now.
        self._lasts = -1
        self._computing = 0  # bytes of the latest plan's passes
        self._ahead = 0  # how many steps in a row have run ahead

    def reserve(self, nbytes: int) -> bool:
        """Remove bytes from the budget; returns False, without effect, if they are in use.

        nbytes: negative to return bytes to the budget.
        """
        if nbytes > max(self.unused, 0):
            return False
        self.limits = replace(self.limits, budget=self.limits.budget - nbytes)
        self.unused -= nbytes
        self.free_for_texts -= nbytes
        return True

    @property
    def busy(self) -> bool:
        return bool(self.sequences.by_number or self._leaving or self.entries.busy)

    def lasts(self, tokens: int) -> bool:
        """Return whether the latest plan is valid for the next step too.

        If so, the step may run without a call of `plan`, and the next call gets the events of
        several steps together.

        tokens: the most tokens that one sequence has generated since the latest call.
        """
        return tokens <= self._lasts and self._latest_limits is self.limits

    def plan(self, now: float, events: Iterable[PlannerEvent]) -> StepPlan:
        """Return the plan of the next step, which may be the latest plan again.

        now: seconds on any clock that only moves forward.
        events: what has happened since the latest call.
        """
        for event in events:
            self._learn(event, now)
            if isinstance(event, Generated):
                self._lasts -= max(map(len, event.tokens.values()))
            elif not isinstance(event, DecodeTimed):
                self._lasts = -1
        if self._lasts < 0 or self._latest_limits is not self.limits:
            self._steps += 1
            self._latest_limits = self.limits
            self._latest = self._decide(now)
            self._lasts = self._tokens_until_change(self._latest)
        return self._latest

    def _decide(self, now: float) -> StepPlan:
        patience = _DISK_PATIENCE + self._other / _DISK_SPEED
        self._disk_hangs = bool(self._other) and now - self._written_at > patience
        self.entries.copied.clear()
        self._claim = 0
        if self._texts.lacking:
            self._claim = self._texts.claim(now, self._budget - self._used())
        unfit = self._refuse_unfit()
        preempt, refuse, used = self._free_memory()
        paused = self._pause_costly_grammars()
        start, refused = self._admit(now)
        refuse += unfit + refused
        join = self._join(now)
        decode = {
            number: len(members) for number, members in sorted(self.sequences.batches().items())
        }
        if paused or start or join:
            used = self._used()
        left = self._budget - used - self.entries.storing_bytes
        prefilling = self.sequences.of("prefill")
        left += self._charges.least_pass(prefilling)
        free = left - self.entries.copied_bytes
        running = self.sequences.of("decode")
        limited = bool(running) and not self._burst.interrupts(running, prefilling, now)
        prefill, score, computing = self._turns.choose(prefilling, now, free, running=limited)
        ahead = not (decode or score) and self._runs_ahead(prefill, computing, free)
        in_flight = self._computing if ahead else 0
        self._computing = computing
        left -= max(computing + in_flight, self._charges.least_pass(prefilling))
        if prefilling:
            used = self._used()  # sequences that share a pass now share arrays
        # Cached prefixes are evicted for texts to embed only if these can then run.
        lent = 0 if self._claim or self._texts.lacking > left else self._texts.lacking
        left -= lent
        self._shrink(left)
        features = self._shrink_features(left - self.entries.index.nbytes)
        left -= self.entries.index.nbytes + self._features
        draft, left = self._draft_widths(left)
        rows = self._rows(left)
        self.free_for_texts += lent + self._claim
        leave, self._leaving = self._leaving, []
        unread, self._unread = self._unread, []
        self.unused = self.limits.budget - used
        return StepPlan(
            number=self._steps,
            features=features,
            unread=tuple(unread),
            evict=self.entries.take_evicted(),
            preempt=(*preempt, *paused),
            leave=tuple(leave),
            refuse=tuple(refuse),
            start=tuple(start),
            join=tuple(join),
            decode=decode,
            draft=draft,
            rows=rows,
            prefill=tuple(prefill),
            ahead=ahead,
            score=tuple(score),
            burst=self._burst.waits,
        )

    def _runs_ahead(self, prefill: Sequence[Sequence[Prefill]], computing: int, free: int) -> bool:
        """Return whether this step's passes may start before those of the previous step end.

        The device then does not wait for the host, but the passes of two steps need memory, and the
        duration of a single step cannot be measured. So every few steps the passes do not run
        ahead.
        """
        runs = bool(prefill) and self.pace.known and computing + self._computing <= free
        self._ahead = self._ahead + 1 if runs and self._ahead < _MOST_AHEAD else 0
        return self._ahead > 0

    def _tokens_until_change(self, plan: StepPlan) -> int:
        """Return by how many tokens each sequence may grow before a plan becomes invalid.

        That is until a sequence needs larger buffers, or no bytes are free. The bytes of this
        growth count as used from now on. Returns -1 if the plan is invalid after its step in any
        case.
        """
        if plan != StepPlan(plan.number, decode=plan.decode, rows=plan.rows):
            return -1
        if not plan.decode or len(self.sequences.by_number) > sum(plan.decode.values()):
            return -1
        if self._other or self._files or self._claim:
            return -1
        if self.entries.busy or self._texts.lacking:
            return -1
        tokens, growth = self._charges.growth(self.sequences.batches().values())
        if growth > self.free_for_texts:
            return -1
        if self.limits.draft_tokens and any(
            sequence.arrived.draft_tokens for sequence in self.sequences.admitted.values()
        ):
            # While drafting is paused, the plan stays valid until the next step that is reported.
            rows, *more = plan.decode.values()
            tokens = 0 if more else self.widths.skip(rows, tokens)
            if not tokens:
                return -1
        self.free_for_texts -= growth
        self.unused -= growth
        return tokens

    # Learning from events.

    def _learn(self, event: PlannerEvent, now: float) -> None:
        sequence = self.sequences.by_number.get(getattr(event, "sequence", 0))
        match event:
            case Generated(tokens):
                for number, own in tokens.items():
                    if generating := self.sequences.by_number.get(number):
                        generating.generated += own
            case Arrived():
                self.sequences.by_number[event.sequence] = SequenceState(
                    event, now, event.width, on_disk=event.on_disk
                )
                self._arrived.append(event.sequence)
                if event.on_disk:
                    self._files = self._read  # files may have been dropped during the read
            case Started(_, reused) if sequence:
                # A file has disappeared, so fewer tokens than planned have KV. The executor has
                # skipped the rest of the plan for this sequence, so that is planned again.
                sequence.filled = reused
                sequence.snapshots = {at for at in sequence.snapshots if at <= reused}
            case Prefilled(_, filled, snapshot) if sequence:
                sequence.filled = filled
                if snapshot:
                    sequence.snapshots.add(filled)
            case Ended(_, failed) if sequence:
                self._ended(sequence, failed=failed)
            case Lost() if sequence:
                self.sequences.preempt(sequence, self._steps)
                sequence.lost = True
            case Stored():
                self.entries.stored(event)
            case NotStored(entry):
                self.entries.storing.pop(entry, None)
            case PrefillTimed(tokens, seconds, behind):
                self.pace.measured(tokens, seconds, behind)
                self._turns.prefilled(seconds)
            case DecodeTimed(seconds, before):
                self._step_seconds = seconds
                self.masks.decoded(seconds, before)
                self._turns.decoded(before + seconds, seconds)
            case Masked(_, seconds, postponed):
                self.masks.masked(seconds)
                if sequence:
                    sequence.mask_seconds, sequence.postponed = seconds, postponed
            case Drafted():
                self.widths.learn(event)
            case OtherBytes(nbytes, features, files, texts):
                if nbytes != self._other:
                    self._written_at = now
                self._other, self._features, self._files = nbytes, features, files
                self._read = files
                self._texts.lack(texts, now)
            case MemoryShort():
                self.entries.clear()

    def _ended(self, sequence: SequenceState, *, failed: bool) -> None:
        entry = self.entries.number_for(sequence, 0 if failed else sequence.storable)
        self.sequences.remove(sequence.number)
        self._leaving.append(Leave(sequence.number, entry))

    # Memory.

    def _used(self) -> int:
        return self._charges.used(self.sequences)

    @property
    def _budget(self) -> int:
        return self.limits.budget - self._other - self._files - self._claim

    def _drop_files(self, starting: SequenceState | None = None) -> None:
        """Drop the KV that was read from disk for waiting sequences, except one about to start.

        Otherwise they could wait for ever, because only their start would free this memory.
        """
        for sequence in self.sequences.of("waiting"):
            if sequence.on_disk and sequence is not starting:
                sequence.on_disk = 0
                self._unread.append(sequence.number)
        self._files = 0

    def _free_memory(self) -> tuple[list[Leave], list[Refusal], int]:
        """Preempt the newest sequences until the others fit, and evict cached prefixes.

        Returns the preempted and the refused sequences, and the bytes charged for the others. KV
        that was read from disk for waiting sequences is dropped first. The KV of preempted
        sequences is stored if it fits. The last sequence is not preempted if KV that is being
        written to disk uses the missing memory; it is refused if the disk hangs.
        """
        computed: list[tuple[SequenceState, int]] = []
        refused: list[Refusal] = []
        if self._files and self._used() > self._budget:
            self._drop_files()
        while (used := self._used()) > self._budget and (admitted := self.sequences.admitted):
            sequence = next(reversed(admitted.values()))
            if len(admitted) == 1:
                soon_free = used <= self.limits.budget - self._claim
                if soon_free and not (self._disk_hangs and sequence.state == "prefill"):
                    break
                if sequence.least > 1:
                    sequence.least = 1
                    continue
                snapshots = self._charges.snapshots(admitted.values())
                if soon_free or used - snapshots > self.limits.budget:
                    refused.append(self._refuse(sequence, used))
                    continue
            computed.append((sequence, sequence.storable))
            self.sequences.preempt(sequence, self._steps)
            self.preemptions += 1
        preempted: list[Leave] = []
        left = self._budget - used - self.entries.storing_bytes
        for sequence, filled in reversed(computed):
            size = self._charges.entry(sequence, filled)
            entry = self.entries.number_for(sequence, filled if size <= left else 0)
            left -= size if entry is not None else 0
            preempted.append(Leave(sequence.number, entry))
        self._shrink(left)
        return preempted, refused, used

    def _pause_costly_grammars(self) -> list[Leave]:
        """Preempt the sequences whose grammars are too costly for the others.

        They start again once decode steps of the others have made up for the time of the grammars.
        """
        if not self.limits.prompt_cache:
            return []
        decoding = self.sequences.of("decode")
        resting = [sequence for sequence in self.sequences.admitted.values() if sequence.postponed]
        seconds = {
            sequence.number: sequence.mask_seconds
            for sequence in decoding
            if not sequence.postponed
        }
        resting += [self.sequences.by_number[number] for number in self.masks.too_costly(seconds)]
        leaving: list[Leave] = []
        for sequence in resting:
            entry = self.entries.number_for(sequence, sequence.storable)
            leaving.append(Leave(sequence.number, entry))
            self.sequences.preempt(sequence, self._steps)
            sequence.resting = True
        return leaving

    def _is_paused(self, sequence: SequenceState) -> bool:
        """Return whether a sequence waits until decode steps make up for its grammar's time."""
        return sequence.resting and self.masks.owed > 0 and bool(self.sequences.of("decode"))

    def _refuse_unfit(self) -> list[Refusal]:
        """Refuse new sequences that would not fit even alone, in the smallest passes.

        Otherwise they would wait until all others have ended, and block later sequences.
        """
        refused: list[Refusal] = []
        arrived, self._arrived = self._arrived, []
        for sequence in filter(None, map(self.sequences.by_number.get, arrived)):
            sequence.width, sequence.least = min(sequence.width, 2), 1
            needed = self._charges.admission(sequence)
            sequence.width, sequence.least = sequence.arrived.width, SMALLEST_STEP
            if needed > self.limits.budget:
                refused.append(self._refuse(sequence, needed))
        return refused

    def _refuse(self, sequence: SequenceState, needed: int) -> Refusal:
        self.sequences.remove(sequence.number)
        self._leaving.append(Leave(sequence.number))
        writing = 0 if needed > self.limits.budget else self._other
        return Refusal(sequence.number, needed, self.limits.budget, sequence.total, writing)

    def _shrink(self, budget: int, *pinned: int) -> None:
        """Evict cached prefixes until they and the cached features use at most these bytes."""
        self.entries.shrink(budget - self._features, *pinned)

    def _shrink_features(self, left: int) -> int | None:
        """Return the new limit for cached features, in bytes; None if they fit into `left`."""
        if self._features <= max(left, 0):
            return None
        self._features = max(left, 0)
        return self._features

    # Admission.

    def _admit(self, now: float) -> tuple[list[Start], list[Refusal]]:
        starts: list[Start] = []
        refused: list[Refusal] = []
        # sequences that keep a slot while they wait for a prefix that is being prefilled
        expecting = 0
        slots = self.limits.slots - len(self.sequences.admitted)
        nobody_waits = len(self.sequences.by_number) == len(self.sequences.admitted)
        if slots <= 0 or self._claim or nobody_waits:
            return starts, refused
        storing = self.entries.storing_bytes
        used = self._used() + storing
        if self.sequences.admitted and used + self.limits.cost.of(1) > self._budget:
            return starts, refused  # not even the shortest sequence fits
        waiting = [
            sequence
            for sequence in self.sequences.of("waiting")
            if sequence.preempted_in != self._steps and not self._is_paused(sequence)
        ]
        urgent = {sequence.number: self._urgency(sequence, now) for sequence in waiting}
        waiting.sort(key=lambda sequence: (urgent[sequence.number], sequence.number))
        if self._waits_for_slots(waiting, slots):
            return starts, refused
        for sequence in waiting:
            if len(starts) + expecting >= slots:
                break
            if self._is_paused(sequence):
                continue  # because of a sequence that has just started
            if sequence.lost and any(other.lost for other in self.sequences.of("prefill")):
                continue  # together, they would need the memory that was lacking
            # Memory is checked first because that is quick: in a long queue, most do not fit.
            sequence.width = sequence.arrived.width
            needed = used + self._charges.admission(sequence)
            empty = not (self.sequences.admitted or storing)
            if needed > self._budget and sequence.width <= 2 and not empty:
                if now - sequence.since > _PATIENCE:
                    break
                continue
            source = self.entries.choose(sequence)
            if self.entries.expects(sequence, source, self._budget - used):
                expecting += 1
                used = self._used() + storing  # the sequence may now need a snapshot
                continue
            while needed > self._budget and sequence.width > 2:
                sequence.width = 1 + (sequence.width - 1) // 2
                needed = used + self._charges.admission(sequence)
            if needed > self._budget and empty:
                sequence.least = 1
                needed = used + self._charges.admission(sequence)
                if needed > self._budget:
                    self._drop_files(sequence)
            if needed > self._budget:
                if empty:
                    if sequence.on_disk:
                        self._files = self._read  # does not start, so its KV from disk stays
                    if needed > self.limits.budget or self._disk_hangs:
                        refused.append(self._refuse(sequence, needed))
                elif now - sequence.since > _PATIENCE:
                    break
                continue
            if self.entries.copied_bytes > max(self._budget - needed, 0):
                break
            starts.append(self._start(sequence, source, self._budget - needed))
            if sequence.resting:
                sequence.resting = False
                self.masks.masked(sequence.mask_seconds)
            used = self._used() + storing
        return starts, refused

    def _waits_for_slots(self, waiting: Sequence[SequenceState], free: int) -> bool:
        """Return whether to leave the free slots unused until the next sequence ends.

        The prompts that start later can share a pass. So the wait saves time if more prompts wait
        than slots are free, and if the slots are unused for less time than the overhead of a pass.

        waiting: the waiting sequences, in the order in which they would start.
        """
        running = self.sequences.of("decode")
        if not (self.limits.together and self.pace.known and running) or len(waiting) <= free:
            return False
        if len(running) < len(self.sequences.admitted):
            return False  # a prompt that is being prefilled can share its pass now
        steps = min(sequence.arrived.limit - len(sequence.generated) for sequence in running)
        if steps * self._step_seconds * free / self.limits.slots >= self.pace.fixed_seconds:
            return False
        return all(
            sequence.target - self.entries.match(sequence).length < self.pace.width
            for sequence in waiting[: free + 1]
        )

    def _urgency(self, sequence: SequenceState, now: float) -> float:
        left = sequence.target - self.entries.match(sequence).length
        return self.pace.urgency(left, now - sequence.since)

    def _start(self, sequence: SequenceState, source: Source | None, left: int) -> Start:
        """Admit a sequence with its first KV from `source`.

        left: bytes that are free after the admission.
        """
        if source is not None and source.kind == "entry":
            self._shrink(left, source.number)
            if self.entries.index.nbytes > max(left, 0) and not source.move:
                # The cached prefix and its copy do not fit in memory together.
                if self.entries.index[source.number].positions is None:
                    source = Source("entry", source.number, source.length, move=True)
                else:
                    self._shrink(0)
                    source = None
        else:
            self._shrink(left)
        sequence.filled = source.length if source else 0
        known = self.entries.positions_of(source)
        if source is not None and source.kind == "entry":
            self.entries.serve(source)
        if not self.limits.trims:
            self._choose_snapshots(sequence, known, left)
        sequence.state, sequence.on_disk, sequence.known = "prefill", 0, sequence.total
        self.sequences.admitted[sequence.number] = sequence
        tokens = (*sequence.arrived.tokens, *sequence.generated)
        return Start(
            sequence.number, tokens, source, sequence.width, tuple(sorted(sequence.snapshots))
        )

    def _choose_snapshots(
        self, sequence: SequenceState, known: Collection[int] | None, left: int
    ) -> None:
        """Choose which snapshots to take, and which of the source's snapshots to copy.

        All snapshots of a prompt must fit into the free bytes and into a share of the prompt cache.
        More than a few of them must not need more bytes than the prompt's KV.

        known: the lengths to which the source can be truncated; None means any length.
        """
        cost = self.limits.cost
        size = max(cost.snapshot(sequence.prompt), 1)
        fair = sequence.prompt * cost.per_token // size + _FEW_SNAPSHOTS
        if not cost.per_token:
            fair = _MOST_SNAPSHOTS  # recurrent state only: nothing else could be stored
        share = max(self.limits.prompt_cache // _SNAPSHOT_SHARE // size, 1)
        fitting = max(left - self.entries.copied_bytes, 0) // size
        most = min(fair, share, fitting, _MOST_SNAPSHOTS)
        sequence.positions, sequence.snapshots = set(), set()
        if self.limits.prompt_cache:
            last, shared = sequence.prompt - 1, self.entries.match(sequence).shared
            likely = sequence.arrived.positions
            expected = [*likely[:1], last, shared, *likely[1:]]
            sequence.positions, sequence.snapshots = checkpoint_positions(
                expected, known, sequence.filled, last, most, sequence.uncut
            )

    # Prefill and decode.

    def _join(self, now: float) -> list[Join]:
        filling: list[SequenceState] = []
        completed: list[SequenceState] = []
        for sequence in self.sequences.of("prefill"):
            if sequence.filled < sequence.target:
                filling.append(sequence)
            elif sequence.arrived.joins:
                completed.append(sequence)
        self._burst.update(completed, filling, now, decoding=bool(self.sequences.of("decode")))
        joins: list[Join] = []
        for sequence in () if self._burst.waits else completed:
            sequence.batch = self._batch_for(sequence)
            sequence.state = "decode"
            joins.append(Join(sequence.number, sequence.batch))
        if joins:
            self._shrink(self._budget - self._used())
        return joins

    def _batch_for(self, sequence: SequenceState) -> int:
        """Return the number of a batch in which little padding is needed, or of a new batch.

        Every sequence of a batch needs as much memory as the longest.
        """
        left = (
            self._budget
            - self._used()
            - self.entries.copied_bytes
            + self._charges.row(sequence.charged)
        )
        padding: dict[int, float] = {}
        batches = self.sequences.batches()
        for number, members in batches.items():
            lengths = [member.charged for member in (*members, sequence)]
            whole = len(lengths) * self._charges.row(max(lengths))
            if whole - len(members) * self._charges.row(max(lengths[:-1])) > left:
                continue  # The padding would cause a preemption.
            wasted = 1 - sum(map(self._charges.row, lengths)) / max(whole, 1)
            uneven = max(lengths) - min(lengths)
            padding[number] = 0.0 if uneven <= UNEVEN else wasted
        if padding:
            best = min(padding, key=lambda number: (padding[number], number))
            if padding[best] <= _WASTE or len(batches) >= _MOST_BATCHES:
                return best
        self._batches += 1
        return self._batches

    def _draft_widths(self, left: int) -> tuple[dict[int, int], int]:
        """Return how many draft tokens each batch may check per sequence, and the bytes left."""
        widths: dict[int, int] = {}
        if not self.limits.draft_tokens:
            return widths, left
        for number, members in sorted(self.sequences.batches().items()):
            if len(members) > 1 and not self.limits.together:
                continue  # the model cannot process several tokens of several sequences in one pass
            wanted = max(sequence.arrived.draft_tokens for sequence in members)
            most = min(wanted, self.limits.draft_tokens)
            if not most or self.widths.skip(len(members)):
                continue
            longest = max(sequence.total for sequence in members)
            while most and self._charges.draft_tokens(len(members), most, longest) > left:
                most //= 2
            if most:
                width = widths[number] = self.widths.choose(len(members), longest, most)
                left -= self._charges.draft_tokens(len(members), width, longest) if width else 0
        return widths, left

    def _rows(self, left: int) -> dict[int, int]:
        """Return how many rows the KV of each batch may have, including unused rows.

        A sequence joins a batch without a copy of the other rows if the batch has an unused row. At
        most the share _WASTE of the rows is unused, and there are never more rows than slots.

        left: bytes for unused rows.
        """
        depths: dict[int, int] = {}
        for number, members in sorted(self.sequences.batches().items()):
            most = min(int(len(members) / (1 - _WASTE)), self.limits.slots)
            depth = self._depths.get(number, 0)
            if not len(members) <= depth <= most:
                depth = most
            nbytes = self._charges.unused_rows(members, depth - len(members))
            if len(members) > 1 and nbytes <= left:
                depths[number] = depth
                left -= nbytes
        self._depths, self.free_for_texts = depths, left
        return depths
