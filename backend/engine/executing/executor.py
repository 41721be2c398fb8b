"""Carries out plans: owns the model, and the KV of sequences and cached prefixes.

The executor runs on the engine thread and decides nothing: a `StepPlan` says what to do, and the
results return to the planner as events. A step is launched as a whole before any result is read, so
that the device works while Python delivers the tokens of the previous step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.errors import NotFinite
from backend.engine.executing.batch import DecodeBatch
from backend.engine.executing.choosing import Sampled
from backend.engine.executing.executor_sequence import (
    GRAMMAR,
    ExecutorSequence,
    Failure,
    Rows,
    start_copies,
)
from backend.engine.executing.kept_entries import KeptEntries, KeptEntry, PrefixFiles
from backend.engine.executing.prefill_passes import PrefillPass, PrefillPasses
from backend.engine.executing.step_times import StepTimes
from backend.engine.model import EngineModel
from backend.engine.planning.plan import (
    DecodeTimed,
    Leave,
    Masked,
    OtherBytes,
    PlannerEvent,
    Prefill,
    Prefilled,
    PrefillTimed,
    Score,
    Start,
    Started,
    StepPlan,
)
from backend.engine.units import MIB

# From these bytes of weights on, a CPU computes a step far longer than Python needs between two
# steps, so tokens are read before the next step is launched.
HEAVY_BYTES = 128 * MIB


class Executor:
    """Runs the plans of one loaded model.

    clock: returns seconds, for the times that are reported to the planner.
    withholds: whether the first tokens of prompts that are completed now stay unread until
        `release`, if they are not also the last tokens.
    """

    def __init__(self, model: EngineModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._model = model
        self._times = StepTimes(clock)
        heavy = model.weights_bytes >= HEAVY_BYTES and model.broadcast is None
        self._reads_early = self._times.in_order and heavy
        self._files = PrefixFiles(model)
        self._passes = PrefillPasses(model, self._files, self._times)
        self._entries = KeptEntries(positions=model.leader is not None and not model.trims)
        self._batches: dict[int, DecodeBatch] = {}
        self._launched_batches: list[DecodeBatch] = []
        self._ahead: list[mx.array] = []  # the tokens that the launched batches compute
        self._plan = StepPlan(0)  # the latest
        self._early: list[Sampled] = []
        self.withholds = False
        self._withheld: list[PrefillPass] = []  # passes whose first tokens are not due yet
        self._drafted: list[PlannerEvent] = []
        self._other = OtherBytes(0)
        self._counts_other = model.media is not None or model.disk is not None
        # working memory for which a batch of texts to embed waits; after a change, the caller asks
        # for `other_memory_events`
        self.lacking_bytes = 0
        self.sequences: dict[int, ExecutorSequence] = {}
        self._with_grammar: dict[int, ExecutorSequence] = {}
        self.failures: list[Failure] = []
        self.prompt_tokens = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of the KV and snapshots of sequences that are prefilled, scored or decoded."""
        nbytes = sum(rows.cache.nbytes for rows in self._rows())
        for sequence in self.sequences.values():
            nbytes += sequence.scoring.nbytes if sequence.scoring is not None else 0
            alone = sequence.rows is not None and sequence.rows.cache.alone
            nbytes += sum(
                kv.snapshot_bytes(kept, shared=alone and at == len(sequence.history))
                for at, kept in sequence.snapshots.items()
                if not self._entries.has_snapshot(kept)
            )
        return nbytes

    @property
    def entry_bytes(self) -> int:
        return self._entries.nbytes

    def memory(self) -> dict[str, int]:
        """Return the bytes that MLX uses for sequences and cached prefixes, by purpose."""
        batches, sequences = self._batches.values(), self.sequences.values()
        # biases, penalties and noise, besides logits that wait to be read
        choosing = sum(batch.chooser_bytes for batch in batches)
        parts = {
            "kv_cache": self.row_bytes,
            "prompt_cache": self.entry_bytes,
            "logits": self._passes.logit_bytes + choosing,
        }
        if self._model.drafting is not None:
            unread = sum(sequence.states.nbytes for sequence in sequences)
            parts["draft_kv_cache"] = unread + sum(batch.draft_bytes for batch in batches)
        if self._model.media is not None:
            prefills = [each.media_prefill for each in sequences if each.media_prefill]
            waiting = sum(prefill.nbytes for prefill in prefills)
            parts["media_features"] = self._model.media.features.size + waiting
        return parts

    def add(self, sequence: ExecutorSequence) -> None:
        """Add a sequence, which a later plan starts."""
        self.sequences[sequence.number] = sequence
        if sequence.constraint is not None:
            self._with_grammar[sequence.number] = sequence

    # Launching a step.

    def launch(self, plan: StepPlan) -> list[PlannerEvent]:
        """Start everything in the plan except prefill and scores, which `settle` starts.

        Returns the events that are known immediately.
        """
        self._times.begin()
        events: list[PlannerEvent] = []
        if plan is not self._plan:
            self._plan = plan
            if self._model.blas is not None:
                self._model.blas.follow()
            self._change(plan, events)
        before_start = None if self._times.in_order else self._before_start
        launched: list[DecodeBatch] = []
        self._launched_batches = launched
        for number in plan.decode:
            if (batch := self._batches.get(number)) is None:
                continue
            try:
                batch.launch(plan.draft.get(number), before_start)
                launched.append(batch)
            except Exception as fault:
                self._break(batch, fault)
        self._ahead = [batch.ahead for batch in launched if batch.ahead is not None]
        self._times.decode_launched(self._ahead)
        return events

    def _change(self, plan: StepPlan, events: list[PlannerEvent]) -> None:
        """Carry out the changes of a plan: what is stored, and where sequences run."""
        for number in plan.unread:
            self.sequences[number].stored = None
        self._entries.evict(plan.evict)
        if plan.features is not None and self._model.media is not None:
            self._model.media.features.shrink(plan.features)
        for preempted in plan.preempt:
            self._preempt(self.sequences[preempted.sequence], preempted.entry)
        self._leave(plan.leave)
        for start in plan.start:
            self._start(start, events)
        joins: dict[int, list[ExecutorSequence]] = {}
        for join in plan.join:
            sequence = self.sequences[join.sequence]
            if sequence.first is not None:
                joins.setdefault(join.batch, []).append(sequence)
        for number, joining in joins.items():
            self._join(number, joining, plan)
        for number in plan.decode:
            if number in self._batches:
                self._allow(self._batches[number], number, plan)
        self._start_copies()
        self._passes.ahead = plan.ahead

    def _delaying_seconds(self) -> float | None:
        """Return the processor time of grammars; None if no sequence decodes without one."""
        running = self.sequences.values()
        if not any(
            sequence.constraint is None and isinstance(sequence.rows, DecodeBatch)
            for sequence in running
        ):
            return None
        return sum(sequence.mask_seconds for sequence in self._with_grammar.values())

    def _start(self, start: Start, events: list[PlannerEvent]) -> None:
        sequence = self.sequences[start.sequence]
        sequence.tokens = start.tokens
        sequence.prompt_logprobs.clear()
        if sequence.scoring is not None:
            sequence.scoring.restart(width=start.width - 1)
        generated = start.tokens[len(sequence.prompt) :]
        sequence.delivered = len(generated)
        if sequence.constraint is not None:
            try:
                sequence.constraint.restart(generated)
            except Exception as fault:
                # The next plan ends it. Until then it runs, because other ranks do not know of the
                # fault.
                self.failures.append(Failure((sequence.number,), GRAMMAR, fault))
        try:
            row, reused = self._fill(sequence, start)
            if self._model.media is not None:
                sequence.media_prefill = self._model.media.begin(
                    sequence.media, sequence.prompt, row
                )
            sequence.rows = Rows(kv.BatchCache([row]), [sequence])
        except Exception as fault:
            self._failed([sequence], "prefix reuse", fault)
            return
        sequence.history = list(start.tokens[:reused])
        events.append(Started(sequence.number, reused))
        whole = reused == len(sequence.prompt) - 1
        if whole and sequence.request.disk.path and self._files.want_prompt(sequence):
            self._save(sequence, sequence.history, row)

    def _fill(self, sequence: ExecutorSequence, start: Start) -> tuple[kv.RowCache, int]:
        """Return the KV with which a sequence starts, and how many tokens it has."""
        source = start.source
        sequence.snapshots = {}
        stored, sequence.stored = sequence.stored, None
        if source is not None and source.kind == "disk" and self._model.disk is not None:
            assert stored is not None
            restored = self._model.disk.restore(stored, kv.new_row(self._model.model))
            if restored is not None:
                return restored, source.length
        elif source is not None and source.kind == "entry":
            entry = self._entries.by_number[source.number]
            if source.move:
                self._entries.take(source.number)
            row = entry.cache if source.move else kv.clone(entry.cache)
            return self._rewound(sequence, row, len(entry.tokens), start, entry.snapshots)
        elif source is not None and source.kind == "sequence":
            other = self.sequences[source.number]
            if other.rows is not None:
                row = other.rows.extract(other)
                return self._rewound(sequence, row, len(other.history), start, other.snapshots)
        return kv.new_row(self._model.model), 0

    def _rewound(
        self,
        sequence: ExecutorSequence,
        row: kv.RowCache,
        length: int,
        start: Start,
        snapshots: dict[int, kv.Snapshot],
    ) -> tuple[kv.RowCache, int]:
        """Return the KV of another sequence, truncated to the length of the source, and the length.

        Returns an empty row and 0 if the KV, of `length` tokens, cannot be truncated.
        """
        assert start.source is not None
        wanted = start.source.length
        # The other sequence may have received less than planned in this very step.
        if wanted > length or not kv.rewind(row, length - wanted, snapshots.get(wanted)):
            return kv.new_row(self._model.model), 0
        for at in start.snapshots:
            if at in snapshots:
                sequence.snapshots[at] = snapshots[at]
            elif kv.rewind(shorter := kv.clone(row), wanted - at, None):
                sequence.snapshots[at] = kv.snapshot(shorter)
                mx.async_eval(kv.states(sequence.snapshots[at]))
        return row, wanted

    def _join(self, number: int, joining: list[ExecutorSequence], plan: StepPlan) -> None:
        for group in {id(sequence.rows): sequence.rows for sequence in joining}.values():
            assert group is not None
            members = [sequence for sequence in group.sequences if sequence in joining]
            try:
                batch = self._batches.get(number) or DecodeBatch(self._model)
                self._allow(batch, number, plan)
                batch.join(group, members)
            except Exception as fault:
                # The batch is unchanged: only the sequences that were to join have lost their KV.
                self._failed(members, "joining the batch", fault)
                continue
            self._batches[number] = batch

    def _allow(self, batch: DecodeBatch, number: int, plan: StepPlan) -> None:
        """Allow unused rows while a prompt is prefilled, because that prompt may join in one."""
        batch.cache.rows = plan.rows.get(number, 0)
        batch.cache.keeps_unused = bool(plan.prefill)

    def _start_copies(self) -> None:
        """Start to compute all KV that was copied because sequences start, join or leave."""
        changed: list[Rows] = []
        for rows in self._rows():
            try:
                rows.settle()
                changed.append(rows)
            except Exception as fault:
                self._break(rows, fault)
        try:
            start_copies(changed, self._entries.new)
        except Exception as fault:
            for rows in changed:
                if rows.cache.copied:
                    self._break(rows, fault)

    def _rows(self) -> list[Rows]:
        """Return the rows in which the KV of the sequences is."""
        return list(
            {
                id(sequence.rows): sequence.rows
                for sequence in self.sequences.values()
                if sequence.rows
            }.values()
        )

    def _before_start(self) -> None:
        """Separate the times of earlier passes and of a decode pass that is about to start."""
        self._passes.wait_for_earlier()
        self._times.decode_starts()

    def _break(self, rows: Rows, fault: Exception) -> None:
        """End rows of which a pass or a copy failed: the KV of all their sequences is undefined."""
        broken, rows.sequences = rows.sequences, []
        self._drop_empty_batches()
        self._failed(broken, "decode" if isinstance(rows, DecodeBatch) else "prefill", fault)

    def _drop_empty_batches(self) -> None:
        self._batches = {n: batch for n, batch in self._batches.items() if batch.sequences}

    # Prefill.

    def _prefill(self, group: Sequence[Prefill], events: list[PlannerEvent]) -> None:
        named = [(self.sequences[part.sequence], part) for part in group]
        # Sequences that failed in this step, or received less than planned, are planned again.
        parts = [
            (sequence, part)
            for sequence, part in named
            if _prefills(sequence) and len(sequence.history) == part.start
        ]
        if not parts:
            return
        try:
            self._passes.launch(parts, events)
        except Exception as fault:
            self._failed([sequence for sequence, _ in parts], "prefill", fault)

    # Reading a step.

    def read(self) -> list[Sampled]:
        """Return the tokens of the previous step, on which this step's decode pass was launched."""
        sampled, self._early = self._early, []
        for batch in self._launched_batches:
            try:
                read = batch.read()
                sampled = sampled + read if sampled else read
                if self._reads_early:
                    sampled += batch.read_early()
            except Exception as fault:
                self._break(batch, fault)
        if self._launched_batches:
            if self._reads_early:
                self._times.decode_finished()
            if not self._times.in_order:
                self._times.decode_read(ahead=bool(self._ahead))
        if self._model.drafting is not None:
            self._count_drafts()
        return sampled

    def _count_drafts(self) -> None:
        """Report how many draft tokens of this step were accepted, and how long the step took."""
        batches, plan = self._launched_batches, self._plan
        steady: tuple[object, ...] = ()
        if plan.only_decodes and not (plan.join or plan.score) and len(batches) == 1:
            steady = (id(batches[0]), len(batches[0].sequences))
        seconds = self._times.since_same_step(steady)
        for batch in batches:
            if batch.sequences and batch.drafted is not None:
                longest = max(len(sequence.history) for sequence in batch.sequences)
                self._drafted.append(replace(batch.drafted, longest=longest, seconds=seconds))

    def settle(self, *, idle: bool) -> list[PlannerEvent]:
        """Start the step's prefill, for which the tokens that `read` returns need not wait.

        Then wait for earlier prefill and for scores.
        idle: whether no sequence decodes.
        """
        events, self._drafted = self._drafted, []
        for group in self._plan.prefill:
            self._passes.grammar_seconds = self._delaying_seconds()
            self._prefill(group, events)
        events += map(DecodeTimed, self._times.take_decoded())
        for sequence in self._with_grammar.values():
            if sequence.mask_seconds or sequence.postponed:
                events.append(Masked(sequence.number, sequence.mask_seconds, sequence.postponed))
                sequence.mask_seconds = 0.0
        if self._passes.in_flight:
            for launched in self._passes.due(idle=idle):
                self._finish_pass(launched, events)
        for score in self._plan.score:
            self._score(score, events)
        self.failures += self._entries.settle(events)
        if self._counts_other:
            events += self.other_memory_events()
        return events

    def _finish_pass(self, launched: PrefillPass, events: list[PlannerEvent]) -> None:
        if not launched.sequences:
            return
        try:
            launched.wait()
            if self.withholds and all(sequence.limit > 1 for sequence in launched.sequences):
                self._withheld.append(launched)
            else:
                self._early += launched.read_first()
        except Exception as fault:
            # If a sequence has joined a batch meanwhile, the failure affects all rows of the batch.
            for rows in {
                id(sequence.rows): sequence.rows for sequence in launched.sequences
            }.values():
                if isinstance(rows, DecodeBatch):
                    self._break(rows, fault)
            self._failed(filter(_prefills, launched.sequences), "prefill", fault)
            return
        for sequence in launched.sequences if launched.logits is not None else ():
            if any(math.isnan(each.logprob) for each in sequence.prompt_logprobs):
                self.failures.append(Failure((sequence.number,), "prefill", NotFinite()))
        events += self._passes.ended(launched)
        self.prompt_tokens += launched.read
        for sequence, tokens, row in launched.saves:
            self._save(sequence, tokens, row)

    def release(self) -> list[Sampled]:
        """Return the first tokens that were withheld."""
        withheld, self._withheld = self._withheld, []
        return [sampled for launched in withheld for sampled in launched.read_first()]

    def take_early(self) -> list[Sampled]:
        """Return the tokens that were read outside a decode step since the last call."""
        early, self._early = self._early, []
        return early

    def _score(self, score: Score, events: list[PlannerEvent]) -> None:
        sequence = self.sequences.get(score.sequence)
        if (
            sequence is None
            or sequence.scoring is None
            or sequence.rows is None
            or sequence.scoring.done
        ):
            return
        self._passes.wait_for_earlier()
        began = self._times.clock()
        try:
            ran, read = sequence.scoring.step(
                self._model.model,
                self._model.vocabulary,
                Rows.gathered([sequence]).cache.layers,
                score.budget,
            )
        except Exception as fault:
            self._failed([sequence], "scoring", fault)
            return
        if len(sequence.history) < len(sequence.prompt):
            sequence.history.append(sequence.prompt[-1])
            events.append(Prefilled(sequence.number, len(sequence.prompt)))
        events.append(PrefillTimed(ran, self._times.waited(began)))
        self.prompt_tokens += read

    # Leaving and storing.

    def _leave(self, leaves: Iterable[Leave]) -> None:
        """Remove sequences; those in the same rows leave together."""
        leaving: dict[int, tuple[Rows, list[ExecutorSequence]]] = {}
        for leave in leaves:
            sequence = self.sequences.pop(leave.sequence, None)
            if sequence is None:
                continue
            self._with_grammar.pop(leave.sequence, None)
            if leave.entry is not None or self._files.want_answer(sequence):
                self._keep(sequence, leave.entry)
            self._passes.forget(sequence)  # a failure of its passes must not affect it any more
            if sequence.rows is not None:
                leaving.setdefault(id(sequence.rows), (sequence.rows, []))[1].append(sequence)
        for rows, gone in leaving.values():
            try:
                rows.leave(gone)
            except Exception as fault:
                self._break(rows, fault)
        self._drop_empty_batches()

    def _keep(self, sequence: ExecutorSequence, number: int | None) -> None:
        """Store a leaving sequence's KV as a cached prefix, unless its last step lost the KV."""
        try:
            if sequence.rows is None:
                self._entries.lose(number)
                return
            entry = KeptEntry(
                sequence.rows.take(sequence),
                sequence.history,
                len(sequence.prompt),
                dict(sequence.snapshots),
            )
        except Exception as fault:
            self.failures.append(Failure((), "prompt cache", fault))
            self._entries.lose(number)
            return
        if self._files.want_answer(sequence):
            self._save(sequence, entry.tokens, entry.cache)
        if number is not None:
            self._entries.add(number, entry)

    def _preempt(self, sequence: ExecutorSequence, entry: int | None) -> None:
        """Store or drop the KV of a sequence, which keeps its tokens and is started again later."""
        batch = sequence.rows
        if entry is not None:
            self._keep(sequence, entry)
        if isinstance(batch, DecodeBatch):
            try:
                self._early += batch.remove_before_read(sequence)
            except Exception as fault:
                self._break(batch, fault)
            self._drop_empty_batches()
        self._reset(sequence)

    def _reset(self, sequence: ExecutorSequence) -> None:
        """Return a sequence to the state without KV."""
        self._passes.forget(sequence)
        if sequence.rows is not None and sequence in sequence.rows.sequences:
            sequence.rows.leave([sequence])
        sequence.rows = sequence.media_prefill = sequence.first = None
        sequence.first_delivered = sequence.postponed = False
        sequence.history, sequence.snapshots = [], {}
        sequence.states.clear()

    def _failed(self, sequences: Iterable[ExecutorSequence], where: str, fault: Exception) -> None:
        broken = list(sequences)
        for sequence in broken:
            self._reset(sequence)
        self.failures.append(Failure(tuple(sequence.number for sequence in broken), where, fault))

    def in_flight(self, sequence: ExecutorSequence) -> bool:
        """Return whether a prefill pass of the sequence has been launched and not waited for."""
        return self._passes.has(sequence)

    def rest(self) -> None:
        """Release passes in flight, because nothing is left to run and nothing waits for them."""
        if self._model.blas is not None:
            self._model.blas.rest()
        self._passes.clear()

    def clear(self) -> None:
        """Drop everything except the model."""
        self._batches.clear()
        self._entries.clear()
        self.sequences.clear()
        self._with_grammar.clear()
        self._passes.clear()
        self._plan, self._launched_batches = StepPlan(0), []
        self._early, self._withheld = [], []
        if self._model.media is not None:
            self._model.media.features.clear()

    def other_memory_events(self) -> list[PlannerEvent]:
        """Report the memory that neither sequences nor cached prefixes use, if it has changed."""
        media, disk = self._model.media, self._model.disk
        other = OtherBytes(
            disk.writing_bytes if disk else 0,
            features=media.features.size if media else 0,
            files=disk.read_bytes if disk else 0,
            texts=self.lacking_bytes,
        )
        if other == self._other:
            return []
        self._other = other
        return [other]

    def _save(self, sequence: ExecutorSequence, tokens: Sequence[int], cache: kv.RowCache) -> None:
        """Pass a copy of the KV to the disk thread. If that fails, no file is written."""
        try:
            self._files.save(sequence, tokens, cache)
        except Exception as fault:
            self.failures.append(Failure((), "prompt cache on disk", fault))


def _prefills(sequence: ExecutorSequence) -> bool:
    """Return whether the sequence has KV and does not decode."""
    return sequence.rows is not None and not isinstance(sequence.rows, DecodeBatch)
