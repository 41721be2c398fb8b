"""Carries plans out: owns the model, the KV of sequences and of stored entries.

It runs on the engine thread and decides nothing: what to do is in the `StepPlan`, and what came of
it goes back to the planner as events. A step is launched whole before anything of it is read, so
that the device works while Python delivers the tokens of the step before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx

from backend.engine import kv, prompt_logprobs
from backend.engine.batch import (
    Chosen,
    DecodeBatch,
    PrefillGroup,
    Sampled,
    accept,
    first_tokens,
    ids,
    sampled_of,
)
from backend.engine.constraints.constraint import AnswerRule
from backend.engine.device import may_wait_within_a_step
from backend.engine.errors import NotFinite
from backend.engine.events import TokenLogprob
from backend.engine.model import EngineModel
from backend.engine.plan import (
    DecodeTimed,
    Guessed,
    Leave,
    Masked,
    NotStored,
    OtherBytes,
    PlannerEvent,
    Prefill,
    Prefilled,
    PrefillTimed,
    Score,
    Start,
    Started,
    StepPlan,
    Stored,
)
from backend.engine.request import GenerationRequest
from backend.engine.scoring import Scoring

GRAMMAR = "grammar"  # where a fault is that leaves the KV whole

if TYPE_CHECKING:
    from backend.engine.disk_cache.cache import StoredPrefix
    from backend.engine.vision.media_plan import MediaPlan
    from backend.engine.vision.media_prefill import MediaPrefill


@dataclass(eq=False, slots=True)
class ExecutorSequence:
    """One sequence as the executor has it.

    history: the tokens whose KV it has, in order. delivered: generated tokens that were read.
    finished: whether it ended by itself, so that its answer may go to disk. group, batch: where
    its KV is, while it is prefilled and while it decodes. first: its first token, chosen by the
    pass that ended its prefill, with those of the others in that pass; first_delivered: whether it
    was read, and seen by the grammar, before the sequence joined a batch. mask_seconds: processor
    time that its grammar took since the latest plan.
    """

    number: int
    request: GenerationRequest
    prompt: Sequence[int]
    limit: int
    constraint: AnswerRule | None = None
    scoring: Scoring | None = None
    media: MediaPlan | None = None
    stored: StoredPrefix | None = None
    group: PrefillGroup | None = None
    media_prefill: MediaPrefill | None = None
    snapshots: dict[int, kv.Snapshot] = field(default_factory=dict)
    tokens: Sequence[int] = ()
    history: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    delivered: int = 0
    finished: bool = False
    first: Chosen | None = None
    first_delivered: bool = False
    mask_seconds: float = 0.0
    batch: DecodeBatch | None = None

    @property
    def longest(self) -> int:
        """Tokens of prompt and output together, at most."""
        return len(self.prompt) + self.limit


@dataclass(frozen=True, slots=True)
class Failure:
    """An action that failed, and the sequences that lost their KV with it."""

    sequences: tuple[int, ...]
    where: str
    fault: Exception


@dataclass(slots=True)
class _Entry:
    """Stored KV of `tokens`, and snapshots of the layers that cannot be cut back.

    prompt: how many of the tokens were the prompt's. nbytes: 0 until it was computed.
    """

    cache: kv.RowCache
    tokens: Sequence[int]
    prompt: int
    snapshots: dict[int, kv.Snapshot]
    nbytes: int = 0


@dataclass(slots=True)
class _Pass:
    """A prefill pass that was launched and not waited for.

    tokens: that it computes, padding included; read: of prompts. behind: tokens before them, of
    the longest prompt. at: when it was launched; done: when it was computed, if the launch did
    that. marks: small arrays that are there when it is done. chosen: the first tokens of those
    whose prompts it ends. saves: what goes to disk when it is done.
    """

    tokens: int
    read: int
    behind: int
    sequences: tuple[ExecutorSequence, ...]
    at: float
    done: float = math.inf
    marks: list[mx.array] = field(default_factory=list)
    chosen: Chosen | None = None
    logits: mx.array | None = None
    following: Sequence[int] = ()
    saves: list[tuple[ExecutorSequence, Sequence[int], kv.RowCache]] = field(default_factory=list)


class Executor:
    """Runs the plans of one loaded model. clock: seconds, for the times that it reports."""

    def __init__(self, model: EngineModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._model = model
        self._clock = clock
        self._batches: dict[int, DecodeBatch] = {}
        self._entries: dict[int, _Entry] = {}
        self._unstored: list[int] = []
        self._passes: list[_Pass] = []
        self._launched: list[_Pass] = []
        self._scores: Sequence[Score] = ()
        self._early: list[Sampled] = []
        self._launched_batches: list[DecodeBatch] = []
        self._guessed: list[PlannerEvent] = []
        self._steady: tuple[object, ...] = ()  # what the latest step was, if it only decoded
        self._read_at = 0.0
        self._ready_at = 0.0  # when the device was last known to have finished something
        self._launched_at = 0.0
        self._decode_launched_at = 0.0  # when the step that is read next was launched
        # A CPU computes within the call that launches, so what was launched first is done then.
        self._in_order = may_wait_within_a_step()
        self._decode_done_at = 0.0
        self._decode_seconds = 0.0
        self._quiet = False  # whether the step only decodes
        self._other = OtherBytes(0)
        self.lent = 0  # bytes that texts to embed need
        self.sequences: dict[int, ExecutorSequence] = {}
        self.failures: list[Failure] = []
        self.prompt_tokens = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of KV of the sequences that are prefilled, scored or decoded, with snapshots."""
        groups = {id(one.group): one.group for one in self.sequences.values() if one.group}
        nbytes = sum(group.cache.nbytes for group in groups.values())
        nbytes += sum(batch.nbytes for batch in self._batches.values())
        stored = {id(kept) for entry in self._entries.values() for kept in entry.snapshots.values()}
        for one in self.sequences.values():
            nbytes += one.scoring.nbytes if one.scoring is not None else 0
            nbytes += sum(
                kv.snapshot_bytes(kept, latest=at == len(one.history))
                for at, kept in one.snapshots.items()
                if id(kept) not in stored
            )
        return nbytes

    @property
    def entry_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def logit_bytes(self) -> int:
        """Bytes of logits that wait to be read, and of what changes those of the next step."""
        waiting = [one.logits for one in (*self._passes, *self._launched) if one.logits is not None]
        changing = sum(batch.chooser_bytes for batch in self._batches.values())
        return sum(logits.nbytes for logits in waiting) + changing

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model's KV."""
        return sum(batch.draft_bytes for batch in self._batches.values())

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features of images and sounds, remembered or waiting for their pass."""
        if self._model.media is None:
            return 0
        own = [one.media_prefill for one in self.sequences.values() if one.media_prefill]
        return self._model.media.features.nbytes + sum(prefill.nbytes for prefill in own)

    def add(self, sequence: ExecutorSequence) -> None:
        """Take a sequence in; a plan starts it."""
        self.sequences[sequence.number] = sequence

    # Launching a step.

    def launch(self, plan: StepPlan) -> list[PlannerEvent]:
        """Start everything in the plan; returns what is known at once."""
        if self._model.blas is not None:
            self._model.blas.follow()
        self._launched_at = self._clock()
        for entry in plan.evict:
            self._entries.pop(entry, None)
        if plan.features is not None and self._model.media is not None:
            self._model.media.features.shrink(plan.features)
        for preempted in plan.preempt:
            self._preempt(self.sequences[preempted.sequence], preempted.entry)
        self._leave(plan.leave)
        events: list[PlannerEvent] = []
        for start in plan.start:
            self._start(start, events)
        joins: dict[int, list[ExecutorSequence]] = {}
        for join in plan.join:
            one = self.sequences[join.sequence]
            if one.first is not None:
                joins.setdefault(join.batch, []).append(one)
        for number, joining in joins.items():
            self._join(number, joining)
        self._settle_groups()
        self._launched_batches = []
        for number in plan.decode:
            if (batch := self._batches.get(number)) is not None:
                self._decode(batch, plan.guess.get(number, 0))
        self._decode_done_at = self._clock()
        self._quiet = plan.only_decodes and not (plan.join or plan.score)
        for group in plan.prefill:
            self._prefill(group, events)
        self._scores = plan.score
        return events

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
                # It ends with the next plan. Until then it runs: other ranks do not know of this.
                self.failures.append(Failure((one.number,), GRAMMAR, fault))
        try:
            row, reused = self._fill(one, start)
            if self._model.media is not None:
                one.media_prefill = self._model.media.begin(one.media, one.prompt, row)
            one.group = PrefillGroup(kv.BatchCache([row]), [one])
        except Exception as fault:
            self._failed([one], "prefix reuse", fault)
            return
        one.history = list(start.tokens[:reused])
        events.append(Started(one.number, reused))
        whole = reused == len(one.prompt) - 1
        if whole and one.request.disk.path and self._saves_prompt(one):
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
            entry = self._entries[source.number]
            if source.move:
                del self._entries[source.number]
            row = entry.cache if source.move else kv.clone(entry.cache)
            return self._rewound(one, row, len(entry.tokens), start, entry.snapshots)
        elif source is not None and source.kind == "sequence":
            other = self.sequences[source.number]
            if (home := other.batch or other.group) is not None:
                row = home.extract(other)
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
        """A cache of `length` tokens, cut back to the source's, and how many are in it then."""
        assert start.source is not None
        wanted = start.source.length
        # The other sequence may have found less than was planned, in this very step.
        if wanted > length or not kv.rewind(row, length - wanted, snapshots.get(wanted)):
            return kv.new_row(self._model.model), 0
        for at in start.snapshots:
            if at in snapshots:
                one.snapshots[at] = snapshots[at]
            elif kv.rewind(shorter := kv.clone(row), wanted - at, None):
                one.snapshots[at] = kv.snapshot(shorter)
                mx.async_eval(kv.states(one.snapshots[at]))
        return row, wanted

    def _join(self, number: int, joining: list[ExecutorSequence]) -> None:
        for group in {id(one.group): one.group for one in joining}.values():
            assert group is not None
            members = [one for one in group.sequences if one in joining]
            try:
                batch = self._batches.get(number) or DecodeBatch(self._model)
                batch.join(group, members)
            except Exception as fault:
                # The batch is as it was: only those that were to join have lost their KV.
                self._failed(members, "joining the batch", fault)
                continue
            self._batches[number] = batch

    def _settle_groups(self) -> None:
        """Let go of the KV of those that have left the rectangle of a prefill group."""
        for group in {id(one.group): one.group for one in self.sequences.values()}.values():
            try:
                if group is not None:
                    group.settle()
            except Exception as fault:
                assert group is not None
                self._failed(list(group.sequences), "prefill", fault)

    def _decode(self, batch: DecodeBatch, width: int) -> None:
        try:
            batch.launch(width)
            self._launched_batches.append(batch)
        except Exception as fault:
            self._break(batch, fault)

    def _break(self, batch: DecodeBatch, fault: Exception) -> None:
        """A failed decode step leaves the KV of the whole batch undefined."""
        broken = list(batch.sequences)
        self._batches = {n: other for n, other in self._batches.items() if other is not batch}
        self._failed(broken, "decode", fault)

    # Prefill.

    def _prefill(self, group: Sequence[Prefill], events: list[PlannerEvent]) -> None:
        named = [(self.sequences[part.sequence], part) for part in group]
        # What failed, or found less than was planned, in this step is planned again.
        parts = [
            (one, part)
            for one, part in named
            if one.group is not None and len(one.history) == part.start
        ]
        if not parts:
            return
        try:
            one, part = parts[0]
            if one.media_prefill is not None or one.request.prompt_logprobs is not None:
                self._prefill_alone(one, part, events)
            else:
                self._prefill_together(parts, events)
        except Exception as fault:
            self._failed([one for one, _ in parts], "prefill", fault)

    def _prefill_alone(
        self, one: ExecutorSequence, part: Prefill, events: list[PlannerEvent]
    ) -> None:
        """A pass of a prompt that has images or sounds, or whose log-probabilities are wanted."""
        assert one.group is not None
        row = one.group.alone(one)
        start, end = part.start, self._end(one, part)
        alternatives = one.request.prompt_logprobs
        if alternatives is not None:
            end = min(end, start + prompt_logprobs.longest_chunk(self._model.vocabulary))
        media = one.media_prefill if start < len(one.prompt) else None
        if media is not None:
            if media.look(start, end):
                return  # Encoding an image or a sound is a pass of its own: it cannot be cut.
            end = min(end, len(one.prompt))
        tokens = one.tokens[start:end]

        def run() -> mx.array:
            if media is not None:
                return media.run(start, end, row)
            logits: mx.array = self._model.model(mx.array([tokens]), cache=row)
            return logits

        one.history += tokens
        launched = _Pass(len(tokens), len(tokens), start, (one,), self._clock())
        last: mx.array | None = None
        if alternatives is not None:
            logits = run()
            last = logits[:, -1]
            if start < len(one.prompt) - 1:
                launched.following = one.prompt[start + 1 : end + 1]
                launched.logits = logits[0, : len(launched.following)]
        elif end == len(one.tokens):
            last = self._model.head.last(run, [len(tokens)])
        else:
            run()
        self._finish_launch(launched, one.group, [(one, part, end)], last, events)

    def _prefill_together(
        self, parts: Sequence[tuple[ExecutorSequence, Prefill]], events: list[PlannerEvent]
    ) -> None:
        """A pass of one prompt, or of several, each padded to the longest."""
        began = self._clock()
        group = PrefillGroup.gathered([one for one, _ in parts])
        planned = {part.sequence: part for _, part in parts}
        ordered = [(one, planned[one.number]) for one in group.sequences]
        ends = [(one, part, self._end(one, part)) for one, part in ordered]
        texts = [one.tokens[part.start : end] for one, part, end in ends]
        counts = [len(text) for text in texts]
        width = max(counts)
        padded = mx.array([[*text, *[0] * (width - len(text))] for text in texts])

        def run() -> mx.array:
            with group.cache.prefill(counts) as layers:
                logits: mx.array = self._model.model(padded, cache=layers)
            return logits

        whole = [at for at, (one, _, end) in enumerate(ends) if end == len(one.tokens)]
        last: mx.array | None = None
        if whole:
            last = self._model.head.last(run, counts)
            last = last if len(whole) == len(ends) else last[mx.array(whole)]
        else:
            run()
        for (one, _, _), text in zip(ends, texts, strict=True):
            one.history += text
        behind = max(part.start for _, part, _ in ends)
        together = tuple(group.sequences)
        launched = _Pass(width * len(ends), sum(counts), behind, together, began)
        self._finish_launch(launched, group, ends, last, events)

    def _end(self, one: ExecutorSequence, part: Prefill) -> int:
        """Where a stretch ends: before the last token if that cannot be cut off for the disk."""
        last = len(one.prompt) - 1
        early = part.start < last < part.end and not self._model.trims and self._saves_prompt(one)
        return last if early else part.end

    def _finish_launch(
        self,
        launched: _Pass,
        group: PrefillGroup,
        ends: Sequence[tuple[ExecutorSequence, Prefill, int]],
        last: mx.array | None,
        events: list[PlannerEvent],
    ) -> None:
        """Choose the first tokens, take the snapshots, and let the device begin.

        last: logits of [sequences, vocabulary] of those whose last token this is.
        """
        whole = [one for one, _, end in ends if end == len(one.tokens)]
        if last is not None and whole:
            chosen = first_tokens(whole, last, self._model)
            launched.marks += chosen.arrays
            launched.chosen = chosen
            for one in whole:
                one.first = chosen
        snapshots: list[kv.Snapshot] = []
        group.cache.let_go()
        for at, (one, part, end) in enumerate(ends):
            kept = part.snapshot and end == part.end
            if kept:
                one.snapshots[end] = group.cache.snapshot(at)
                snapshots.append(one.snapshots[end])
            last_token = len(one.prompt) - 1
            if part.start < last_token <= end and self._saves_prompt(one):
                row = group.extract(one)
                kv.trim(row, end - last_token)
                launched.saves.append((one, one.tokens[:last_token], row))
            events.append(Prefilled(one.number, end, kept))
        launched.marks.append(group.cache.marker(snapshots))
        if launched.logits is not None:
            mx.async_eval(launched.logits)
        if self._in_order:
            launched.done = self._clock()
        self._launched.append(launched)

    # Reading a step.

    def read(self) -> list[Sampled]:
        """The tokens of the step before, which this step's decode was launched on."""
        sampled = self.take_early()
        for batch in self._launched_batches:
            try:
                sampled += batch.read()
            except Exception as fault:
                self._break(batch, fault)
        if sampled:
            now, began = self._clock(), max(self._ready_at, self._decode_launched_at)
            if self._in_order:
                now, began = self._decode_done_at, self._launched_at
            self._decode_seconds = now - began
            self._ready_at = now
        self._decode_launched_at = self._launched_at
        if self._model.drafting is not None:
            self._count_guesses()
        return sampled

    def _count_guesses(self) -> None:
        """Tell the planner what became of the guesses of this step, and how long it took."""
        now, batches = self._clock(), self._launched_batches
        steady: tuple[object, ...] = ()
        if self._quiet and len(batches) == 1:
            steady = (id(batches[0]), len(batches[0].sequences), batches[0].width)
        seconds = now - self._read_at if steady and steady == self._steady else 0.0
        self._steady, self._read_at = steady, now
        for batch in batches:
            if batch.sequences:
                longest = max(len(one.history) for one in batch.sequences)
                self._guessed.append(
                    Guessed(
                        len(batch.sequences),
                        longest,
                        batch.width,
                        batch.proposed,
                        tuple(batch.right),
                        seconds,
                    )
                )

    def settle(self, *, idle: bool) -> list[PlannerEvent]:
        """Wait for what does not hold up tokens: prefill, scores, stored entries.

        The latest passes stay in flight behind the next decode step, except when nothing decodes
        (`idle`) and none was in flight before. A CPU is waited for, or the first tokens would come
        after the next decode step, which it computes within the call that launches.
        """
        events, self._guessed = self._guessed, []
        if self._decode_seconds:
            events.append(DecodeTimed(self._decode_seconds))
            self._decode_seconds = 0.0
        for one in self.sequences.values():
            if one.mask_seconds:
                events.append(Masked(one.number, one.mask_seconds))
                one.mask_seconds = 0.0
        waiting = len(self._passes) or (len(self._launched) if idle else 0)
        if self._in_order:
            waiting = len(self._passes) + len(self._launched)
        self._passes += self._launched
        self._launched = []
        for _ in range(waiting):
            self._finish_pass(self._passes.pop(0), events)
        for score in self._scores:
            self._score(score, events)
        self._finish_entries(events)
        events += self.weigh_other()
        return events

    def _finish_pass(self, launched: _Pass, events: list[PlannerEvent]) -> None:
        if not launched.sequences:
            return
        try:
            mx.eval(launched.marks)
            if launched.logits is not None:
                (one,) = launched.sequences
                alternatives = one.request.prompt_logprobs
                assert alternatives is not None
                one.prompt_logprobs += prompt_logprobs.read(
                    launched.logits, launched.following, alternatives
                )
                if any(math.isnan(each.logprob) for each in one.prompt_logprobs):
                    self.failures.append(Failure((one.number,), "prefill", NotFinite()))
        except Exception as fault:
            # Sequences that joined a batch meanwhile have brought what failed into all of it.
            for batch in {id(one.batch): one.batch for one in launched.sequences}.values():
                if batch is not None:
                    self._break(batch, fault)
            self._failed(
                [one for one in launched.sequences if one.group is not None], "prefill", fault
            )
            return
        self._early += self._read_first(launched)
        began = max(self._ready_at, launched.at)
        self._ready_at = min(self._clock(), launched.done)
        events.append(PrefillTimed(launched.tokens, self._ready_at - began, launched.behind))
        self.prompt_tokens += launched.read
        for one, tokens, row in launched.saves:
            self._save(one, tokens, row)

    def _read_first(self, launched: _Pass) -> list[Sampled]:
        """The first tokens of those that wait for their batch: before its step is launched, which
        takes its time."""
        chosen = launched.chosen
        if chosen is None or all(one.first is not chosen for one in launched.sequences):
            return []
        tokens = ids(chosen.tokens)
        for one, token in zip(chosen.sequences, tokens, strict=True):
            if one.first is chosen:
                accept(one, token, chosen.faults)
                one.first_delivered = True
        sampled = sampled_of(chosen.sequences, chosen, tokens)
        return [one for one in sampled if one.sequence.first is chosen]

    def take_early(self) -> list[Sampled]:
        """The tokens that became known beside a decode step, since the last call."""
        early, self._early = self._early, []
        return early

    def _score(self, score: Score, events: list[PlannerEvent]) -> None:
        one = self.sequences.get(score.sequence)
        if one is None or one.scoring is None or one.group is None or one.scoring.done:
            return
        started = self._clock()
        try:
            ran, read = one.scoring.step(
                self._model.model, self._model.vocabulary, one.group.alone(one), score.budget
            )
        except Exception as fault:
            self._failed([one], "scoring", fault)
            return
        if len(one.history) < len(one.prompt):
            one.history.append(one.prompt[-1])
            events.append(Prefilled(one.number, len(one.prompt)))
        self._ready_at = self._clock()
        events.append(PrefillTimed(ran, self._ready_at - started))
        self.prompt_tokens += read

    # Leaving and storing.

    def _leave(self, leaves: Iterable[Leave]) -> None:
        """Take sequences out, all of a batch at once."""
        going: dict[int, tuple[DecodeBatch, list[ExecutorSequence]]] = {}
        for leave in leaves:
            one = self.sequences.pop(leave.sequence, None)
            if one is None:
                continue
            if leave.entry is not None or self._saves_answer(one):
                self._keep(one, leave.entry)
            if one.group is not None:
                one.group.drop(one)
            if one.batch is not None:
                going.setdefault(id(one.batch), (one.batch, []))[1].append(one)
        for batch, leaving in going.values():
            try:
                batch.leave(leaving)
            except Exception as fault:
                self._break(batch, fault)
        self._batches = {n: batch for n, batch in self._batches.items() if batch.sequences}

    def _keep(self, one: ExecutorSequence, number: int | None) -> None:
        """Make an entry of what a leaving sequence has; it may have lost it in its last step."""
        try:
            if one.batch is not None:
                cache = one.batch.take(one)
            elif one.group is not None:
                cache = one.group.extract(one)
            else:
                self._unstored += [] if number is None else [number]
                return
            entry = _Entry(cache, one.history, len(one.prompt), one.snapshots)
        except Exception as fault:
            self.failures.append(Failure((), "prompt cache", fault))
            if number is not None:
                self._unstored.append(number)
            return
        if self._saves_answer(one):
            self._save(one, entry.tokens, entry.cache)
        if number is not None:
            self._entries[number] = entry

    def _finish_entries(self, events: list[PlannerEvent]) -> None:
        events += [NotStored(number) for number in self._unstored]
        self._unstored.clear()
        for number, entry in list(self._entries.items()):
            if entry.nbytes:
                continue
            try:
                kv.evaluate(entry.cache)
                kept = [kv.evaluated(snapshot) for snapshot in entry.snapshots.values()]
            except Exception as fault:
                self.failures.append(Failure((), "prompt cache", fault))
                del self._entries[number]
                events.append(NotStored(number))
                continue
            entry.nbytes = max(kv.nbytes(entry.cache) + sum(kept), 1)
            length = len(entry.tokens)
            places = None
            # Other ranks may have layers that cannot be cut back, and this one none.
            divided = self._model.leader is not None
            if not kv.can_trim(entry.cache) or (divided and not self._model.trims):
                places = tuple(sorted({*entry.snapshots, length}))
            after = tuple(entry.tokens[entry.prompt :])
            events.append(Stored(number, length, after, entry.nbytes, places))

    def _preempt(self, one: ExecutorSequence, entry: int | None) -> None:
        """Store or drop the KV of a sequence; its tokens stay, and it starts again later."""
        batch = one.batch
        if entry is not None:
            self._keep(one, entry)
        if batch is not None:
            try:
                self._early += batch.give_up(one)
            except Exception as fault:
                self._break(batch, fault)
            if not batch.sequences:
                self._batches = {n: b for n, b in self._batches.items() if b is not batch}
        self._reset(one)

    def _reset(self, one: ExecutorSequence) -> None:
        """Back to no KV. What is in flight for it is nobody's any more."""
        for launched in (*self._passes, *self._launched):
            launched.sequences = tuple(other for other in launched.sequences if other is not one)
        if one.group is not None:
            one.group.drop(one)
        one.group = one.batch = one.media_prefill = one.first = None
        one.first_delivered = False
        one.history, one.snapshots = [], {}

    def _failed(self, sequences: Iterable[ExecutorSequence], where: str, fault: Exception) -> None:
        broken = list(sequences)
        for one in broken:
            self._reset(one)
        self.failures.append(Failure(tuple(one.number for one in broken), where, fault))

    def in_flight(self, sequence: ExecutorSequence) -> bool:
        """Whether a prefill pass of the sequence was launched and not waited for."""
        return any(sequence in one.sequences for one in (*self._passes, *self._launched))

    def rest(self) -> None:
        """Nothing is left to run: let go of passes that nobody waits for."""
        if self._model.blas is not None:
            self._model.blas.rest()
        self._passes, self._launched = [], []

    def clear(self) -> None:
        """Drop everything but the model."""
        self._batches.clear()
        self._entries.clear()
        self.sequences.clear()
        self._passes, self._launched, self._launched_batches = [], [], []
        self._early, self._scores = [], ()
        if self._model.media is not None:
            self._model.media.features.clear()

    def weigh_other(self) -> list[PlannerEvent]:
        """What else takes memory, where that has changed."""
        media, disk = self._model.media, self._model.disk
        waiting = disk.waiting_bytes if disk else 0
        other = OtherBytes(waiting + self.lent, media.features.nbytes if media else 0)
        if other == self._other:
            return []
        self._other = other
        return [other]

    # Disk.

    def _saves_answer(self, one: ExecutorSequence) -> bool:
        return one.finished and one.request.disk.saves_answer and self._has_files(one)

    def _saves_prompt(self, one: ExecutorSequence) -> bool:
        """Whether the prompt goes to disk, all but its last token: whoever sends it again needs
        what follows that."""
        if one.scoring is not None or not self._has_files(one):
            return False
        return one.request.disk.saves_prompt(trimmable=self._model.trims)

    def _has_files(self, one: ExecutorSequence) -> bool:
        """Whether files may hold KV of the sequence; they know of no images. Asked before anything
        is copied for them."""
        disk = self._model.disk
        return disk is not None and one.media is None and disk.has_files(one.request.disk.path)

    def _save(self, one: ExecutorSequence, tokens: Sequence[int], cache: kv.RowCache) -> None:
        """Hand a copy of the KV to the disk thread. Where that fails, there is no file."""
        assert self._model.disk is not None
        try:
            kv.evaluate(cache)
            copied, trimmable = kv.clone(cache), kv.can_trim(cache)
            path = one.request.disk.path
            self._model.disk.save(list(tokens), copied, trimmable=trimmable, path=path)
        except Exception as fault:
            self.failures.append(Failure((), "prompt cache on disk", fault))
