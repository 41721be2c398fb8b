"""Carries out plans: owns the model, and the KV of sequences and stored entries.

It runs on the engine thread and decides nothing: what to do is in the `StepPlan`, and the results
return to the planner as events. A step is launched as a whole before any of it is read, so that the
device works while Python delivers the tokens of the previous step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.errors import NotFinite
from backend.engine.executing.batch import DecodeBatch
from backend.engine.executing.choosing import Sampled
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.executing.failure import GRAMMAR, Failure
from backend.engine.executing.kept_entries import KeptEntries, KeptEntry
from backend.engine.executing.prefill_passes import PrefillPass, PrefillPasses
from backend.engine.executing.prefix_files import PrefixFiles
from backend.engine.executing.rows import Rows
from backend.engine.executing.step_times import StepTimes
from backend.engine.model import EngineModel
from backend.engine.planning.plan import (
    DecodeTimed,
    Guessed,
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

# A CPU computes a step of so large a model far longer than Python needs between two steps, so that
# tokens need not wait until the next step is launched.
HEAVY_BYTES = 128 * MIB


class Executor:
    """Runs the plans of one loaded model. clock: seconds, for the times that it reports."""

    def __init__(self, model: EngineModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._model = model
        self._times = StepTimes(clock)
        heavy = model.weights_bytes >= HEAVY_BYTES and model.spread is None
        self._reads_early = self._times.in_order and heavy
        self._files = PrefixFiles(model)
        self._passes = PrefillPasses(model, self._files, self._times)
        self._entries = KeptEntries(places=model.leader is not None and not model.trims)
        self._batches: dict[int, DecodeBatch] = {}
        self._launched_batches: list[DecodeBatch] = []
        self._prefills: Sequence[Sequence[Prefill]] = ()
        self._scores: Sequence[Score] = ()
        self._plan = StepPlan(0)  # the latest
        self._early: list[Sampled] = []
        self._guessed: list[PlannerEvent] = []
        self._only_decodes = False  # whether the step only decodes
        self._other = OtherBytes(0)
        self.lacking_bytes = 0  # working memory for which a batch of texts to embed waits
        self.sequences: dict[int, ExecutorSequence] = {}
        self.failures: list[Failure] = []
        self.prompt_tokens = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of KV of the sequences that are prefilled, scored or decoded, with snapshots."""
        nbytes = sum(rows.cache.nbytes for rows in self._rows())
        for one in self.sequences.values():
            nbytes += one.scoring.nbytes if one.scoring is not None else 0
            nbytes += sum(
                kv.snapshot_bytes(kept, latest=at == len(one.history))
                for at, kept in one.snapshots.items()
                if not self._entries.has_snapshot(kept)
            )
        return nbytes

    @property
    def entry_bytes(self) -> int:
        return self._entries.nbytes

    @property
    def logit_bytes(self) -> int:
        """Bytes of logits that wait to be read, and of biases and penalties for the next step."""
        changing = sum(batch.chooser_bytes for batch in self._batches.values())
        return self._passes.logit_bytes + changing

    @property
    def draft_bytes(self) -> int:
        """Bytes of the KV of guessers, and of the hidden states that they have not read."""
        unread = sum(one.states.nbytes for one in self.sequences.values())
        return unread + sum(batch.draft_bytes for batch in self._batches.values())

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features of images and sounds, remembered or waiting for their pass."""
        if self._model.media is None:
            return 0
        own = [one.media_prefill for one in self.sequences.values() if one.media_prefill]
        return self._model.media.features.nbytes + sum(prefill.nbytes for prefill in own)

    def add(self, sequence: ExecutorSequence) -> None:
        """Accept a sequence; a plan starts it later."""
        self.sequences[sequence.number] = sequence

    # Launching a step.

    def launch(self, plan: StepPlan) -> list[PlannerEvent]:
        """Start everything in the plan except prefill and scores, which `settle` starts.

        Returns the events that are known immediately.
        """
        if self._model.blas is not None:
            self._model.blas.follow()
        self._times.begin()
        events: list[PlannerEvent] = []
        if plan is not self._plan:
            self._plan = plan
            self._change(plan, events)
        self._launched_batches = []
        for number in plan.decode:
            if number in self._batches:
                self._decode(number, plan)
        launched = [batch.ahead for batch in self._launched_batches if batch.ahead is not None]
        self._times.decode_launched(launched)
        self._only_decodes = plan.only_decodes and not (plan.join or plan.score)
        self._prefills, self._scores = plan.prefill, plan.score
        self._passes.ahead = plan.ahead
        return events

    def _change(self, plan: StepPlan, events: list[PlannerEvent]) -> None:
        """Carry out what a plan changes: what is stored, and which sequences run where."""
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
            one = self.sequences[join.sequence]
            if one.first is not None:
                joins.setdefault(join.batch, []).append(one)
        for number, joining in joins.items():
            self._join(number, joining, plan)
        self._settle_groups()

    def _delaying_seconds(self) -> float | None:
        """Processor time of this step's grammars; None if no sequence decodes without a grammar."""
        running = self.sequences.values()
        if not any(one.constraint is None and isinstance(one.rows, DecodeBatch) for one in running):
            return None
        return sum(one.mask_seconds for one in running)

    def _start(self, start: Start, events: list[PlannerEvent]) -> None:
        one = self.sequences[start.sequence]
        one.tokens = start.tokens
        one.prompt_logprobs.clear()
        if one.scoring is not None:
            one.scoring.restart(width=start.width - 1)
        generated = start.tokens[len(one.prompt) :]
        one.delivered = len(generated)
        if one.constraint is not None:
            try:
                one.constraint.restart(generated)
            except Exception as fault:
                # The next plan ends it. Until then it runs, because other ranks do not know of the
                # fault.
                self.failures.append(Failure((one.number,), GRAMMAR, fault))
        try:
            row, reused = self._fill(one, start)
            if self._model.media is not None:
                one.media_prefill = self._model.media.begin(one.media, one.prompt, row)
            one.rows = Rows(kv.BatchCache([row]), [one])
        except Exception as fault:
            self._failed([one], "prefix reuse", fault)
            return
        one.history = list(start.tokens[:reused])
        events.append(Started(one.number, reused))
        whole = reused == len(one.prompt) - 1
        if whole and one.request.disk.path and self._files.want_prompt(one):
            self._save(one, one.history, row)

    def _fill(self, one: ExecutorSequence, start: Start) -> tuple[kv.RowCache, int]:
        """The KV that a sequence starts with, and how many tokens are in it."""
        source = start.source
        one.snapshots = {}
        stored, one.stored = one.stored, None
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
            return self._rewound(one, row, len(entry.tokens), start, entry.snapshots)
        elif source is not None and source.kind == "sequence":
            other = self.sequences[source.number]
            if other.rows is not None:
                row = other.rows.extract(other)
                return self._rewound(one, row, len(other.history), start, other.snapshots)
        return kv.new_row(self._model.model), 0

    def _rewound(
        self,
        one: ExecutorSequence,
        row: kv.RowCache,
        length: int,
        start: Start,
        snapshots: dict[int, kv.Snapshot],
    ) -> tuple[kv.RowCache, int]:
        """The KV of another sequence, truncated to the length in `start.source`, and that length.

        row: the KV before, of `length` tokens. If it cannot be truncated: an empty row and 0."""
        assert start.source is not None
        wanted = start.source.length
        # The other sequence may have received less than planned in this very step.
        if wanted > length or not kv.rewind(row, length - wanted, snapshots.get(wanted)):
            return kv.new_row(self._model.model), 0
        for at in start.snapshots:
            if at in snapshots:
                one.snapshots[at] = snapshots[at]
            elif kv.rewind(shorter := kv.clone(row), wanted - at, None):
                one.snapshots[at] = kv.snapshot(shorter)
                mx.async_eval(kv.states(one.snapshots[at]))
        return row, wanted

    def _join(self, number: int, joining: list[ExecutorSequence], plan: StepPlan) -> None:
        for group in {id(one.rows): one.rows for one in joining}.values():
            assert group is not None
            members = [one for one in group.sequences if one in joining]
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
        """Allow empty rows while a prompt is prefilled, because that prompt may take one."""
        batch.allow(plan.rows.get(number, 0), gaps=bool(plan.prefill))

    def _settle_groups(self) -> None:
        """Free the KV of sequences that have left the rectangle of a prefill group."""
        for group in self._rows():
            try:
                if not isinstance(group, DecodeBatch):
                    group.settle()
            except Exception as fault:
                self._failed(list(group.sequences), "prefill", fault)

    def _rows(self) -> list[Rows]:
        """Where the KV of the sequences is."""
        return list(
            {id(one.rows): one.rows for one in self.sequences.values() if one.rows}.values()
        )

    def _decode(self, number: int, plan: StepPlan) -> None:
        batch = self._batches[number]
        try:
            self._allow(batch, number, plan)
            batch.launch(plan.guess.get(number), self._before_decode)
            self._launched_batches.append(batch)
        except Exception as fault:
            self._break(batch, fault)

    def _before_decode(self) -> None:
        self._passes.wait_for_earlier()
        self._times.decode_starts()

    def _break(self, batch: Rows, fault: Exception) -> None:
        """End a batch whose decode step failed: the KV of all its sequences is undefined."""
        broken, batch.sequences = batch.sequences, []
        self._batches = {n: other for n, other in self._batches.items() if other is not batch}
        self._failed(broken, "decode", fault)

    # Prefill.

    def _prefill(self, group: Sequence[Prefill], events: list[PlannerEvent]) -> None:
        named = [(self.sequences[part.sequence], part) for part in group]
        # Sequences that failed in this step, or received less than planned, are planned again.
        parts = [
            (one, part) for one, part in named if _prefills(one) and len(one.history) == part.start
        ]
        if not parts:
            return
        try:
            self._passes.launch(parts, events)
        except Exception as fault:
            self._failed([one for one, _ in parts], "prefill", fault)

    # Reading a step.

    def read(self) -> list[Sampled]:
        """The tokens of the previous step, on which this step's decode pass was launched."""
        sampled = self.take_early()
        for batch in self._launched_batches:
            try:
                sampled += batch.read()
                if self._reads_early:
                    sampled += batch.read_early()
            except Exception as fault:
                self._break(batch, fault)
        if self._launched_batches:
            if self._reads_early:
                self._times.decode_finished()
            ahead = any(batch.ahead is not None for batch in self._launched_batches)
            self._times.decode_read(ahead=ahead)
        if self._model.drafting is not None:
            self._count_guesses()
        return sampled

    def _count_guesses(self) -> None:
        """Report how many guesses of this step were right, and how long the step took."""
        batches = self._launched_batches
        steady: tuple[object, ...] = ()
        if self._only_decodes and len(batches) == 1:
            steady = (id(batches[0]), len(batches[0].sequences))
        seconds = self._times.since_same_step(steady)
        for batch in batches:
            if batch.sequences and batch.reported:
                longest = max(len(one.history) for one in batch.sequences)
                self._guessed.append(
                    Guessed(
                        len(batch.sequences),
                        longest,
                        batch.width,
                        batch.proposed,
                        tuple(batch.right),
                        seconds,
                        batch.behind,
                    )
                )

    def settle(self, *, idle: bool) -> list[PlannerEvent]:
        """Start the step's prefill, and wait for what delays no tokens: earlier prefill, scores.

        Prefill starts only here, because the tokens that `read` returns need not wait for it.
        idle: nothing decodes.
        """
        events, self._guessed = self._guessed, []
        for group in self._prefills:
            self._passes.grammar_seconds = self._delaying_seconds()
            self._prefill(group, events)
        events += map(DecodeTimed, self._times.take_decoded())
        for one in self.sequences.values():
            if one.mask_seconds or one.postponed:
                events.append(Masked(one.number, one.mask_seconds, one.postponed))
                one.mask_seconds = 0.0
        for launched in self._passes.due(idle=idle):
            self._finish_pass(launched, events)
        for score in self._scores:
            self._score(score, events)
        self.failures += self._entries.settle(events)
        events += self.other_memory_events()
        return events

    def _finish_pass(self, launched: PrefillPass, events: list[PlannerEvent]) -> None:
        if not launched.sequences:
            return
        try:
            launched.wait()
            self._early += launched.read_first()
        except Exception as fault:
            # Sequences that have joined a batch meanwhile have spread the failure to all of it.
            for rows in {id(one.rows): one.rows for one in launched.sequences}.values():
                if isinstance(rows, DecodeBatch):
                    self._break(rows, fault)
            self._failed(filter(_prefills, launched.sequences), "prefill", fault)
            return
        for one in launched.sequences if launched.logits is not None else ():
            if any(math.isnan(each.logprob) for each in one.prompt_logprobs):
                self.failures.append(Failure((one.number,), "prefill", NotFinite()))
        events += self._passes.ended(launched)
        self.prompt_tokens += launched.read
        for one, tokens, row in launched.saves:
            self._save(one, tokens, row)

    def take_early(self) -> list[Sampled]:
        """The tokens that were read outside a decode step since the last call."""
        early, self._early = self._early, []
        return early

    def _score(self, score: Score, events: list[PlannerEvent]) -> None:
        one = self.sequences.get(score.sequence)
        if one is None or one.scoring is None or one.rows is None or one.scoring.done:
            return
        self._passes.wait_for_earlier()
        began = self._times.clock()
        try:
            ran, read = one.scoring.step(
                self._model.model,
                self._model.vocabulary,
                Rows.gathered([one]).cache.layers,
                score.budget,
            )
        except Exception as fault:
            self._failed([one], "scoring", fault)
            return
        if len(one.history) < len(one.prompt):
            one.history.append(one.prompt[-1])
            events.append(Prefilled(one.number, len(one.prompt)))
        events.append(PrefillTimed(ran, self._times.waited(began)))
        self.prompt_tokens += read

    # Leaving and storing.

    def _leave(self, leaves: Iterable[Leave]) -> None:
        """Remove sequences; those in the same rows leave together."""
        leaving: dict[int, tuple[Rows, list[ExecutorSequence]]] = {}
        for leave in leaves:
            one = self.sequences.pop(leave.sequence, None)
            if one is None:
                continue
            if leave.entry is not None or self._files.want_answer(one):
                self._keep(one, leave.entry)
            self._passes.forget(one)  # a failure of its passes must not affect it any more
            if one.rows is not None:
                leaving.setdefault(id(one.rows), (one.rows, []))[1].append(one)
        for rows, gone in leaving.values():
            try:
                rows.leave(gone)
            except Exception as fault:
                self._break(rows, fault)
        self._batches = {n: batch for n, batch in self._batches.items() if batch.sequences}

    def _keep(self, one: ExecutorSequence, number: int | None) -> None:
        """Store a leaving sequence's KV as an entry, unless its last step has lost the KV."""
        try:
            if one.rows is None:
                self._entries.lose(number)
                return
            entry = KeptEntry(one.rows.take(one), one.history, len(one.prompt), dict(one.snapshots))
        except Exception as fault:
            self.failures.append(Failure((), "prompt cache", fault))
            self._entries.lose(number)
            return
        if self._files.want_answer(one):
            self._save(one, entry.tokens, entry.cache)
        if number is not None:
            self._entries.add(number, entry)

    def _preempt(self, one: ExecutorSequence, entry: int | None) -> None:
        """Store or drop the KV of a sequence. It keeps its tokens, and is started again later."""
        batch = one.rows
        if entry is not None:
            self._keep(one, entry)
        if isinstance(batch, DecodeBatch):
            try:
                self._early += batch.remove_before_read(one)
            except Exception as fault:
                self._break(batch, fault)
            if not batch.sequences:
                self._batches = {n: b for n, b in self._batches.items() if b is not batch}
        self._reset(one)

    def _reset(self, one: ExecutorSequence) -> None:
        """Return a sequence to the state without KV."""
        self._passes.forget(one)
        if one.rows is not None and one in one.rows.sequences:
            one.rows.leave([one])
        one.rows = one.media_prefill = one.first = None
        one.first_delivered = one.postponed = False
        one.history, one.snapshots = [], {}
        one.states.clear()

    def _failed(self, sequences: Iterable[ExecutorSequence], where: str, fault: Exception) -> None:
        broken = list(sequences)
        for one in broken:
            self._reset(one)
        self.failures.append(Failure(tuple(one.number for one in broken), where, fault))

    def in_flight(self, sequence: ExecutorSequence) -> bool:
        """Whether a prefill pass of the sequence has been launched and not waited for."""
        return self._passes.has(sequence)

    def rest(self) -> None:
        """Release passes that nothing waits for, because nothing is left to run."""
        if self._model.blas is not None:
            self._model.blas.rest()
        self._passes.clear()

    def clear(self) -> None:
        """Drop everything except the model."""
        self._batches.clear()
        self._entries.clear()
        self.sequences.clear()
        self._passes.clear()
        self._launched_batches = []
        self._early, self._prefills, self._scores = [], (), ()
        if self._model.media is not None:
            self._model.media.features.clear()

    def other_memory_events(self) -> list[PlannerEvent]:
        """Report the memory that neither sequences nor entries use, if it has changed."""
        media, disk = self._model.media, self._model.disk
        if media is None and disk is None and self.lacking_bytes == self._other.texts:
            return []
        other = OtherBytes(
            disk.writing_bytes if disk else 0,
            features=media.features.nbytes if media else 0,
            files=disk.read_bytes if disk else 0,
            texts=self.lacking_bytes,
        )
        if other == self._other:
            return []
        self._other = other
        return [other]

    def _save(self, one: ExecutorSequence, tokens: Sequence[int], cache: kv.RowCache) -> None:
        """Hand a copy of the KV to the disk thread. If that fails, no file is written."""
        try:
            self._files.save(one, tokens, cache)
        except Exception as fault:
            self.failures.append(Failure((), "prompt cache on disk", fault))


def _prefills(one: ExecutorSequence) -> bool:
    """Whether the sequence has KV and does not decode."""
    return one.rows is not None and not isinstance(one.rows, DecodeBatch)
