"""Carries plans out: owns the model, the KV of sequences and of stored entries.

It runs on the engine thread and decides nothing: what to do is in the `StepPlan`, and what came of
it goes back to the planner as events. A step is launched whole before anything of it is read, so
that the device works while Python delivers the tokens of the step before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from backend.engine import kv, prompt_logprobs
from backend.engine.batch import DecodeBatch, Sampled
from backend.engine.constraints.constraint import Constraint
from backend.engine.events import TokenLogprob
from backend.engine.model import EngineModel
from backend.engine.plan import (
    DecodeTimed,
    Leave,
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

if TYPE_CHECKING:
    from backend.engine.disk_cache.cache import StoredPrefix
    from backend.engine.vision.plan import MediaPlan
    from backend.engine.vision.prefill import MediaPrefill


@dataclass(eq=False, slots=True)
class ExecutorSequence:
    """One sequence as the executor has it.

    history: the tokens whose KV it has, in order. delivered: generated tokens that were read.
    finished: whether it ended by itself, so that its answer may go to disk. fresh: whether the
    token that is fed next was delivered before, or belongs to the prompt.
    """

    number: int
    request: GenerationRequest
    prompt: Sequence[int]
    limit: int
    constraint: Constraint | None = None
    scoring: Scoring | None = None
    media: MediaPlan | None = None
    stored: StoredPrefix | None = None
    cache: kv.RowCache | None = None
    media_prefill: MediaPrefill | None = None
    snapshots: dict[int, kv.Snapshot] = field(default_factory=dict)
    tokens: Sequence[int] = ()
    history: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    delivered: int = 0
    fresh: bool = True
    finished: bool = False
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

    tokens: that it computes, padding included; read: of prompts. at: when it was launched. saves:
    what goes to disk when it is done.
    """

    tokens: int
    read: int
    sequences: tuple[ExecutorSequence, ...]
    wanted: list[Any]
    at: float = 0.0
    logits: mx.array | None = None
    following: Sequence[int] = ()
    saves: list[tuple[ExecutorSequence, kv.RowCache]] = field(default_factory=list)


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
        self._ready_at = 0.0  # when the device was last known to have finished something
        self._launched_at = 0.0
        self._decode_launched_at = 0.0  # when the step that is read next was launched
        self._decode_seconds = 0.0
        self._other = 0
        self.sequences: dict[int, ExecutorSequence] = {}
        self.failures: list[Failure] = []
        self.prompt_tokens = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of KV of the sequences that are prefilled or decoded."""
        lone = sum(kv.nbytes(one.cache) for one in self.sequences.values() if one.cache is not None)
        return lone + sum(batch.nbytes for batch in self._batches.values())

    @property
    def entry_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values())

    def add(self, sequence: ExecutorSequence) -> None:
        """Take a sequence in; a plan starts it."""
        self.sequences[sequence.number] = sequence

    # Launching a step.

    def launch(self, plan: StepPlan) -> list[PlannerEvent]:
        """Start everything in the plan; returns what is known at once."""
        if self._model.blas is not None:
            self._model.blas.adjust()
        self._launched_at = self._clock()
        for entry in plan.evict:
            self._entries.pop(entry, None)
        for preempted in plan.preempt:
            self._preempt(self.sequences[preempted.sequence], preempted.entry)
        self._leave(plan.leave)
        events: list[PlannerEvent] = []
        for start in plan.start:
            self._start(start, events)
        joins: dict[int, list[ExecutorSequence]] = {}
        for join in plan.join:
            one = self.sequences[join.sequence]
            if one.cache is not None and len(one.history) >= len(one.tokens) - 1:
                joins.setdefault(join.batch, []).append(one)
        for number, joining in joins.items():
            self._join(number, joining)
        self._launched_batches = []
        for number in plan.decode:
            if (batch := self._batches.get(number)) is not None:
                self._decode(batch)
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
        try:
            if one.constraint is not None:
                one.constraint.restart(generated)
            reused = self._fill(one, start)
            if self._model.media is not None:
                assert one.cache is not None
                one.media_prefill = self._model.media.begin(one.media, one.prompt, one.cache)
        except Exception as fault:
            self._failed([one], "prefix reuse", fault)
            return
        one.history = list(start.tokens[:reused])
        events.append(Started(one.number, reused))
        if one.request.disk.path and one.cache is not None and self._saves_prompt(one):
            self._save(one, one.history, one.cache)

    def _fill(self, one: ExecutorSequence, start: Start) -> int:
        """Give the sequence its KV; returns how many tokens are in it."""
        source = start.source
        one.snapshots = {}
        stored, one.stored = one.stored, None
        if source is not None and source.kind == "disk" and self._model.disk is not None:
            assert stored is not None
            one.cache = self._model.disk.restore(stored, kv.new_row(self._model.model))
            if one.cache is not None:
                return source.length
        elif source is not None and source.kind == "entry":
            entry = self._entries[source.number]
            if source.move:
                del self._entries[source.number]
            one.cache = entry.cache if source.move else kv.clone(entry.cache)
            return self._rewind(one, len(entry.tokens), start, entry.snapshots)
        elif source is not None and source.kind == "sequence":
            other = self.sequences[source.number]
            if other.batch is not None:
                one.cache = other.batch.extract(other)
            elif other.cache is not None:
                one.cache = kv.clone(other.cache)
            if one.cache is not None:
                return self._rewind(one, len(other.history), start, other.snapshots)
        one.cache = kv.new_row(self._model.model)
        return 0

    def _rewind(
        self,
        one: ExecutorSequence,
        length: int,
        start: Start,
        snapshots: dict[int, kv.Snapshot],
    ) -> int:
        """Cut a cache of `length` tokens back to the source's; returns how many are in it then."""
        assert one.cache is not None
        assert start.source is not None
        wanted = start.source.length
        # The other sequence may have found less than was planned, in this very step.
        if wanted > length or not kv.rewind(one.cache, length - wanted, snapshots.get(wanted)):
            one.cache = kv.new_row(self._model.model)
            return 0
        for at in start.snapshots:
            if at in snapshots:
                one.snapshots[at] = snapshots[at]
            elif kv.rewind(shorter := kv.clone(one.cache), wanted - at, None):
                one.snapshots[at] = kv.snapshot(shorter)
        return wanted

    def _join(self, number: int, joining: list[ExecutorSequence]) -> None:
        try:
            batch = self._batches.get(number) or DecodeBatch(self._model)
            batch.join(joining)
        except Exception as fault:
            # The batch is as it was: only those that were to join have lost their KV.
            self._failed(joining, "joining the batch", fault)
            return
        self._batches[number] = batch
        for one in joining:
            self.prompt_tokens += not one.delivered  # the prompt's last token, which decode feeds
            one.batch, one.cache, one.media_prefill = batch, None, None

    def _decode(self, batch: DecodeBatch) -> None:
        try:
            batch.launch()
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
            if one.cache is not None and len(one.history) == part.start
        ]
        if not parts:
            return
        try:
            if len(parts) == 1:
                self._prefill_alone(*parts[0], events)
            else:
                self._prefill_together(parts, events)
        except Exception as fault:
            self._failed([one for one, _ in parts], "prefill", fault)

    def _prefill_alone(
        self, one: ExecutorSequence, part: Prefill, events: list[PlannerEvent]
    ) -> None:
        cache = one.cache
        assert cache is not None
        start, end = part.start, part.end
        alternatives = one.request.prompt_logprobs
        if alternatives is not None:
            longest = prompt_logprobs.longest_chunk(self._model.vocabulary)
            end = min(end, start + longest)
        if one.media_prefill is not None and one.media_prefill.look(start, end):
            return  # Encoding an image or a sound is a pass of its own: it cannot be cut.
        tokens = one.tokens[start:end]
        if one.media_prefill is not None and start < len(one.prompt):
            end = min(end, len(one.prompt))
            tokens = one.tokens[start:end]
            logits = one.media_prefill.run(start, end, cache)
        else:
            logits = self._model.model(mx.array([tokens]), cache=cache)
        one.history += tokens
        wanted: list[Any] = [layer.state for layer in cache]
        launched = _Pass(len(tokens), len(tokens), (one,), wanted)
        if alternatives is not None and start < len(one.prompt) - 1:
            launched.following = one.prompt[start + 1 : end + 1]
            launched.logits = logits[0, : len(launched.following)]
            wanted.append(logits)
        snapshot = part.snapshot and end == part.end
        if snapshot:
            one.snapshots[end] = kv.snapshot(cache)
        events.append(Prefilled(one.number, end, snapshot))
        self._launch_pass(launched)

    def _prefill_together(
        self, parts: Sequence[tuple[ExecutorSequence, Prefill]], events: list[PlannerEvent]
    ) -> None:
        group = kv.BatchCache([one.cache for one, _ in parts if one.cache is not None])
        texts = [one.tokens[part.start : part.end] for one, part in parts]
        counts = [len(text) for text in texts]
        width = max(counts)
        padded = [[*text, *[0] * (width - len(text))] for text in texts]
        with group.prefill(counts) as layers:
            self._model.model(mx.array(padded), cache=layers)
        wanted: list[Any] = []
        for at, ((one, part), text) in enumerate(zip(parts, texts, strict=True)):
            one.cache = group.extract(at)
            one.history += text
            wanted += [layer.state for layer in one.cache]
            if part.snapshot:
                one.snapshots[part.end] = kv.snapshot(one.cache)
            events.append(Prefilled(one.number, part.end, part.snapshot))
        together = tuple(one for one, _ in parts)
        read = sum(map(len, texts))
        self._launch_pass(_Pass(width * len(parts), read, together, wanted))

    def _launch_pass(self, launched: _Pass) -> None:
        launched.saves = [
            (one, kv.clone(one.cache))
            for one in launched.sequences
            if one.cache is not None and self._saves_prompt(one)
        ]
        launched.at = self._clock()
        mx.async_eval(launched.wanted)
        self._launched.append(launched)

    # Reading a step.

    def read(self) -> list[Sampled]:
        """The tokens of the step before, which this step's decode was launched on."""
        sampled, self._early = self._early, []
        for batch in self._launched_batches:
            try:
                sampled += batch.read()
            except Exception as fault:
                self._break(batch, fault)
        if sampled:
            now = self._clock()
            self._decode_seconds = now - max(self._ready_at, self._decode_launched_at)
            self._ready_at = now
        self._decode_launched_at = self._launched_at
        return sampled

    def settle(self, *, idle: bool) -> list[PlannerEvent]:
        """Wait for what does not hold up tokens: prefill, scores, stored entries.

        The latest passes stay in flight behind the next decode step, except when nothing decodes
        (`idle`) and none was in flight before.
        """
        events: list[PlannerEvent] = []
        if self._decode_seconds:
            events.append(DecodeTimed(self._decode_seconds))
            self._decode_seconds = 0.0
        waiting = len(self._passes) or (len(self._launched) if idle else 0)
        self._passes += self._launched
        self._launched = []
        for _ in range(waiting):
            self._finish_pass(self._passes.pop(0), events)
        for score in self._scores:
            self._score(score, events)
        self._finish_entries(events)
        self._weigh_other(events)
        return events

    def _finish_pass(self, launched: _Pass, events: list[PlannerEvent]) -> None:
        if not launched.sequences:
            return
        try:
            mx.eval(launched.wanted)
            if launched.logits is not None:
                (one,) = launched.sequences
                alternatives = one.request.prompt_logprobs
                assert alternatives is not None
                one.prompt_logprobs += prompt_logprobs.read(
                    launched.logits, launched.following, alternatives
                )
        except Exception as fault:
            # Sequences that joined a batch meanwhile have brought what failed into all of it.
            for batch in {id(one.batch): one.batch for one in launched.sequences}.values():
                if batch is not None:
                    self._break(batch, fault)
            self._failed(
                (one for one in launched.sequences if one.cache is not None), "prefill", fault
            )
            return
        ready = self._clock()
        began = max(self._ready_at, launched.at)
        events.append(PrefillTimed(launched.tokens, ready - began))
        self._ready_at = ready
        self.prompt_tokens += launched.read
        for one, cache in launched.saves:
            self._save(one, one.tokens[: len(one.prompt) - 1], cache)

    def _score(self, score: Score, events: list[PlannerEvent]) -> None:
        one = self.sequences.get(score.sequence)
        if one is None or one.scoring is None or one.cache is None or one.scoring.done:
            return
        started = self._clock()
        try:
            ran, read = one.scoring.step(
                self._model.model, self._model.vocabulary, one.cache, score.budget
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
            elif one.cache is not None:
                cache = kv.owned(one.cache)
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
            if not kv.can_trim(entry.cache):
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
        one.cache = one.batch = one.media_prefill = None
        one.history, one.snapshots = [], {}
        one.fresh = True

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

    def _weigh_other(self, events: list[PlannerEvent]) -> None:
        media, disk = self._model.media, self._model.disk
        other = (media.features.nbytes if media else 0) + (disk.waiting_bytes if disk else 0)
        if other != self._other:
            self._other = other
            events.append(OtherBytes(other))

    # Disk.

    def _saves_answer(self, one: ExecutorSequence) -> bool:
        text = self._model.disk is not None and one.media is None
        return text and one.finished and one.request.disk.saves_answer

    def _saves_prompt(self, one: ExecutorSequence) -> bool:
        """Whether the prompt is saved now, where its prefill ends; files know of no images."""
        whole = len(one.history) == len(one.prompt) - 1 and one.cache is not None
        if self._model.disk is None or one.media is not None or one.scoring is not None:
            return False
        return whole and one.request.disk.saves_prompt(trimmable=kv.can_trim(one.cache or []))

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
