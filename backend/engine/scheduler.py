"""Runs the rows of one model: admits, prefills in chunks between decode steps, decodes, finishes.

Everything happens on the engine thread, one `step` at a time. A row is in exactly one place:
`waiting`, `prefilling`, or the batch; whoever cancels looks in those three.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import mlx.core as mx

from backend.engine import kv, prompt_logprobs
from backend.engine.admission import bytes_with, kv_bytes
from backend.engine.batch import DecodeBatch, Sampled
from backend.engine.commands import Submit
from backend.engine.errors import EngineError, EngineFailed, Overloaded
from backend.engine.events import Event
from backend.engine.gauges import Gauges
from backend.engine.heartbeat import counted
from backend.engine.model import EngineModel
from backend.engine.prefill import SMALLEST_STEP, Pace, chunk_end
from backend.engine.prompt_store import PromptStore, Report
from backend.engine.row import Row
from backend.engine.score_plan import ScorePlan
from backend.engine.scoring import Scoring
from common.stop_strings import StopMatcher

Publish = Callable[[int, Event | EngineError], None]

_TIDY_EVERY = 512  # decode steps between two returns of freed buffers to the system
_WEIGH_EVERY = 32  # decode steps between two readings of the bytes of KV
_MIB = 1 << 20


class Scheduler:
    """Owner of all rows of one loaded model.

    publish: tells a row's owner of an event or of the row's failure. report: logs a fault with
    its exception.
    """

    def __init__(
        self, model: EngineModel, publish: Publish, report: Report, gauges: Gauges
    ) -> None:
        self._model = model
        self._publish = publish
        self._report = report
        self._gauges = gauges
        self._pace = Pace(model.prefill_chunk, model.stall_ms)
        self._steps = 0
        self.waiting: deque[Row] = deque()
        self.prefilling: deque[Row] = deque()
        self.batch = DecodeBatch(model.model, model.end_tokens, model.vocabulary, model.drafting)
        self.store = PromptStore(model, report)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.batch.rows)

    @property
    def admitted(self) -> list[Row]:
        return [*self.prefilling, *self.batch.rows]

    def submit(self, command: Submit) -> None:
        self.waiting.append(
            Row(
                ticket=command.ticket,
                request=command.request,
                prompt=command.prompt,
                limit=command.limit,
                text=self._model.new_text(command.request.prompt.continues),
                stop=StopMatcher(command.request.stop),
                constraint=command.constraint,
                stored=command.stored,
                scoring=self._scoring(command.plan),
                stable=0 if command.plan is None else command.plan.stable,
                media=command.media,
            )
        )

    def _scoring(self, plan: ScorePlan | None) -> Scoring | None:
        return None if plan is None else Scoring(plan, side_by_side=self._model.batches)

    def cancel(self, ticket: int) -> None:
        """Take a row out wherever it is. Its owner knows, so nothing is published."""
        for queue in (self.waiting, self.prefilling):
            for row in queue:
                if row.ticket == ticket:
                    queue.remove(row)
                    self._settle()
                    return
        self.batch.remove([row for row in self.batch.rows if row.ticket == ticket])
        self._settle()

    def cancel_all(self, error: EngineError) -> None:
        """End every row with an error and forget every stored prefix."""
        for row in [*self.waiting, *self.admitted]:
            self._publish(row.ticket, error)
        self.waiting.clear()
        self.prefilling.clear()
        self.batch.clear()
        self.store.memory.clear()
        if self._model.media is not None:
            self._model.media.features.clear()
        self._settle()

    def step(self) -> None:
        """One round: every running row gets a token, every prefilling row gets its turn."""
        self._admit()
        self._prefill()
        self._make_room()
        self._decode()
        self._settle()

    def _admit(self) -> None:
        expecting = 0  # rows at the head of the queue that wait for a sibling, and keep a slot
        while expecting < len(self.waiting) and self._has_slot(expecting):
            row = self.waiting[expecting]
            if self._expects(row):
                expecting += 1
                continue
            needed = self._model.weights_bytes + bytes_with(self._model.cost, self.admitted, row)
            if needed > self._model.memory_limit:
                if row.scoring is not None and row.scoring.width > 1:
                    row.scoring.width //= 2
                    continue
                if self.admitted:
                    return
                del self.waiting[expecting]
                self._publish(row.ticket, self._too_large(row, needed))
                continue
            self.store.memory.shrink(self._model.memory_limit - needed)
            del self.waiting[expecting]
            row.admit()
            self._gauges.heartbeat.begin("start of a prompt")
            try:
                self.store.start(row)
                self._open_media(row)
                self.prefilling.append(row)
            except Exception as fault:
                self._fail(row, "prefix reuse", fault)

    def _open_media(self, row: Row) -> None:
        if self._model.media is not None:
            assert row.cache is not None
            row.media_prefill = self._model.media.begin(row.media, row.prompt, row.cache)

    def _has_slot(self, kept: int) -> bool:
        return len(self.admitted) + kept < self._model.slots

    def _expects(self, row: Row) -> bool:
        """Whether the row is better off once a row in prefill has read what both begin with."""
        sibling = row.sibling
        if sibling is None or sibling.reached or sibling.row not in self.prefilling:
            sibling = row.sibling = self.store.sibling(row, self.prefilling)
        return sibling is not None and not sibling.reached

    def _prefill(self) -> None:
        budget = self._pace.tokens(running=bool(self.batch.rows))
        while self.prefilling and budget > 0:
            row = self.prefilling.popleft()
            try:
                if row.scoring is not None and row.filled == len(row.prompt) - 1:
                    budget -= self._score(row, row.scoring, budget)
                else:
                    budget -= self._prefill_chunk(row, budget)
                if row.prefilled:
                    self._start(row)
                else:
                    self.prefilling.append(row)
            except Exception as fault:
                self._fail(row, "prefill", fault)

    def _prefill_chunk(self, row: Row, budget: int) -> int:
        """Run one chunk; returns what it counts against the budget of this step."""
        assert row.cache is not None
        alternatives = row.request.prompt_logprobs
        if alternatives is not None:
            budget = min(budget, prompt_logprobs.longest_chunk(self._model.vocabulary))
        end = chunk_end(row.filled, len(row.prompt), budget, row.checkpoints)
        tokens = end - row.filled
        media = " with media" if row.media_prefill is not None else ""
        self._gauges.heartbeat.begin(f"prefill of {counted(tokens, 'token')}{media}")
        if row.media_prefill is not None and (seen := row.media_prefill.look(row.filled, end)):
            return seen  # a step of its own: it cannot be cut, and says nothing of the pace
        if tokens > 0:
            started = time.perf_counter()
            logits = self._run(row, row.filled, end)
            if alternatives is not None:
                following = row.prompt[row.filled + 1 : end + 1]
                row.prompt_logprobs += prompt_logprobs.read(logits[0], following, alternatives)
            kv.evaluate(row.cache)
            self._pace.measured(tokens, time.perf_counter() - started)
            self._gauges.prompt_tokens_processed += tokens
            row.filled = end
        self.store.prefilled(row, tokens)
        return max(tokens, SMALLEST_STEP)

    def _run(self, row: Row, start: int, end: int) -> mx.array:
        """Logits of a stretch of the prompt, which goes into the row's cache."""
        assert row.cache is not None
        if row.media_prefill is not None:
            return row.media_prefill.run(start, end, row.cache)
        logits: mx.array = self._model.model(mx.array([row.prompt[start:end]]), cache=row.cache)
        return logits

    def _score(self, row: Row, scoring: Scoring, budget: int) -> int:
        """Run one stretch of the continuations; returns what it counts against the budget."""
        assert row.cache is not None
        self._gauges.heartbeat.begin(f"scoring of {counted(scoring.width, 'candidate')}")
        started = time.perf_counter()
        ran, read = scoring.step(self._model.model, self._model.vocabulary, row.cache, budget)
        self._pace.measured(ran, time.perf_counter() - started)
        self._gauges.prompt_tokens_processed += read
        return max(ran, SMALLEST_STEP)

    def _start(self, row: Row) -> None:
        """Move a prefilled row into the batch."""
        assert row.cache is not None
        cache, row.cache = row.cache, None
        row.read_media()
        grammar_ended = row.constraint is not None and row.constraint.ended
        if row.request.prompt_only or row.scoring is not None or grammar_ended:
            for event in row.finish_unstarted():
                self._publish(row.ticket, event)
            return
        self.batch.join(row, cache)
        self._gauges.prompt_tokens_processed += 1  # the last one, which decode feeds

    def _make_room(self) -> None:
        """Keep the rows within the memory limit as they grow; who came last yields first.

        A row that has said nothing yet goes back to wait; one that has must be told.
        """
        while self.admitted:
            needed = self._model.weights_bytes + kv_bytes(self._model.cost, self.admitted)
            if needed <= self._model.memory_limit:
                self.store.memory.shrink(self._model.memory_limit - needed)
                return
            if self.prefilling:
                row = self.prefilling.pop()
                row.restart()
                self.waiting.appendleft(row)
                continue
            row = self.batch.rows[-1]
            self.batch.remove([row])
            self._publish(
                row.ticket,
                Overloaded(
                    f"the KV cache is full after {len(row.generated)} generated tokens: ask again"
                    " later, ask for fewer tokens, or load the model with fewer parallel rows"
                ),
            )

    def _decode(self) -> None:
        if not self.batch.rows:
            return
        sequences = counted(len(self.batch.rows), "sequence")
        self._gauges.heartbeat.begin(f"decode step of {sequences}")
        started = time.perf_counter()
        try:
            sampled = self.batch.step()
        except Exception as fault:
            self._report("decode", fault)
            for row in self.batch.rows:
                self._publish(row.ticket, _fault(fault))
            self.batch.clear()
            return
        ended: list[Row] = []
        for one in sampled:
            if one.row not in ended and self._hand_out(one):
                ended.append(one.row)
        for row in ended:
            if row.ended is not None:
                self.store.answered(row, self.batch)
        self.batch.remove(ended)
        self._count(len(sampled), time.perf_counter() - started)

    def _hand_out(self, sampled: Sampled) -> bool:
        """Publish what the token gave; True when it was the row's last."""
        row, before = sampled.row, len(sampled.row.generated)
        if sampled.fault is not None:
            self._fail(row, "grammar", sampled.fault)
            return True
        try:
            events = row.take(sampled.token, self._model.end_tokens, sampled.logprob)
        except Exception as fault:
            self._fail(row, "text", fault)
            return True
        self._gauges.tokens_generated += len(row.generated) - before
        for event in events:
            self._publish(row.ticket, event)
        return row.ended is not None

    def _fail(self, row: Row, where: str, fault: Exception) -> None:
        """A fault of one row ends that row alone."""
        if isinstance(fault, EngineError):
            self._publish(row.ticket, fault)
            return
        self._report(where, fault)
        self._publish(row.ticket, _fault(fault))

    def _count(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        if tokens and seconds > 0:
            self._gauges.tokens_per_second = tokens / seconds
        if self._steps % _TIDY_EVERY == 0:
            mx.clear_cache()

    def _settle(self) -> None:
        """Update the gauges; with nothing left to run, give freed buffers back to the system."""
        gauges = self._gauges
        gauges.waiting = len(self.waiting)
        gauges.running = len(self.prefilling) + len(self.batch)
        if self.busy and self._steps % _WEIGH_EVERY:
            return
        own = sum(kv.nbytes(row.cache) for row in self.prefilling if row.cache is not None)
        gauges.row_bytes = own + self.batch.nbytes
        gauges.prefix_bytes = self.store.memory.nbytes
        gauges.feature_bytes = self._model.media.features.nbytes if self._model.media else 0
        if not self.busy:
            gauges.tokens_per_second = 0.0
            mx.clear_cache()

    def _too_large(self, row: Row, needed: int) -> Overloaded:
        return Overloaded(
            f"a prompt of {len(row.prompt)} tokens with its output needs {needed // _MIB} MiB with"
            f" the model, but the limit is {self._model.memory_limit // _MIB} MiB: shorten the"
            " prompt, ask for fewer tokens, or raise memory_limit_mib"
        )


def _fault(fault: Exception) -> EngineFailed:
    return EngineFailed(f"the model failed on this request ({type(fault).__name__})")
