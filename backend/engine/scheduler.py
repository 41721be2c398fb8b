"""Runs the sequences of one model: the planner decides a step, the executor carries it out.

All work happens on the engine thread, one `step` at a time: plan, launch, read and deliver the
tokens of the previous step, then wait for work that delays no token.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from backend.engine.commands import Submit
from backend.engine.device import return_buffers
from backend.engine.engine_state import DraftReport, Gauges
from backend.engine.errors import (
    EngineError,
    EngineFailed,
    InvalidRequest,
    ModelRejected,
    Overloaded,
    is_allocation_failure,
)
from backend.engine.events import Undelivered
from backend.engine.executing.choosing import Sampled
from backend.engine.executing.executor import Executor
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.executing.scoring import Scoring
from backend.engine.model import EngineModel
from backend.engine.output import Output, RepetitionGuard
from backend.engine.planning.plan import (
    Arrived,
    DecodeTimed,
    Ended,
    Generated,
    Limits,
    Lost,
    MemoryShort,
    PassCost,
    PlannerEvent,
    Refusal,
    Started,
    StepPlan,
)
from backend.engine.planning.planner import Planner
from backend.engine.planning.prefix_index import PrefixKey
from backend.engine.request import MOST_DRAFT_TOKENS
from backend.engine.sampling.filters import search_all
from backend.engine.units import MIB
from common.field_names import named
from common.stop_strings import StopMatcher
from common.wording import shown

if TYPE_CHECKING:
    from backend.engine.vision.media_prefill import MediaReader

_log = logging.getLogger(__name__)

Publish = Callable[[int, Undelivered | EngineError], None]


class Flush(Protocol):
    def __call__(self, *, everything: bool = False, until_next: float = 0.0) -> None: ...


Report = Callable[[str, BaseException], None]

# llguidance reports no size. A matcher of a schema with 30 properties took 0.06 MiB after 30
# tokens.
_MATCHER_BYTES = 1 << 20
_WRITE_WAIT = 0.05  # seconds for which an engine without other work waits for writes to disk
_TIDY_EVERY = 512  # steps between two returns of freed buffers to the system


class Scheduler:
    """The planner, the executor and the answers of one loaded model.

    publish: sends an event or an error to a sequence's owner.
    flush: delivers what was published, before a step that takes time.
    report: logs a fault with its exception.
    more: returns whether prompts have arrived that were not submitted yet.
    """

    def __init__(
        self,
        model: EngineModel,
        publish: Publish,
        report: Report,
        gauges: Gauges,
        flush: Flush = lambda *, everything=False, until_next=0.0: None,  # noqa: ARG005
        more: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model = model
        self._publish = publish
        self._report = report
        self._gauges = gauges
        self._flush = flush
        self._more = more
        self._steps = 0
        self._plan = StepPlan(0)  # the latest
        self._step_name = ""
        self._latest_seconds = 0.0  # predicted duration of the latest step
        self._began = 0.0  # time.perf_counter() when the latest step was launched
        self._outputs: dict[int, Output] = {}
        self._events: list[PlannerEvent] = []
        # Events that the planner need not get at every step: tokens, and times of decode steps.
        self._generated: defaultdict[int, list[int]] = defaultdict(list)
        self._grown = 0  # at least the number of these tokens of any sequence
        self._decoded: list[float] = []
        self._retried: set[int] = set()
        self._unstarted: set[int] = set()  # sequences that will generate nothing
        self._watched: set[int] = set()  # sequences whose owners requested prompt progress
        self._draft_report: DraftReport | None = None  # the latest report that the gauges have
        self.executor = _executor_of(model)
        self.planner = Planner(
            Limits(
                cost=model.cost,
                slots=model.slots,
                budget=model.memory_limit - model.weights_bytes,
                prompt_cache=model.prompt_cache_bytes,
                max_entries=model.max_cache_entries,
                prefill_chunk=model.prefill_chunk,
                stall_ms=model.stall_ms,
                together=model.together,
                trims=model.trims,
                passes=model.passes,
                draft_tokens=MOST_DRAFT_TOKENS if model.drafting is not None else 0,
                draft=model.drafting.cost if model.drafting is not None else None,
                draft_passes=model.drafting.passes if model.drafting is not None else PassCost(),
            ),
            model.pace,
        )
        self._adapter_bytes = 0 if model.adapters is None else model.adapters.nbytes
        gauges.experts = None if model.experts is None else model.experts.counts
        self._show_drafting()

    @property
    def busy(self) -> bool:
        return bool(self._outputs or self._events or self.planner.busy)

    @property
    def waiting(self) -> bool:
        """Whether a sequence is waiting for a token."""
        return bool(self._outputs)

    def prefill_seconds(self, command: Submit) -> float:
        """Estimate the prefill time, in seconds, of the tokens that are not in the prompt cache."""
        pace = self.planner.pace
        if not pace.known:
            return 0.0
        key = command.key or PrefixKey(command.prompt)
        return pace.seconds(len(command.prompt) - self.planner.entries.index.find(key).length)

    def submit(self, command: Submit) -> None:
        """Add a sequence; the next step may start it."""
        request, plan, media = command.request, command.plan, command.media
        adapters = self._model.adapters
        if command.adapter and not (adapters and command.adapter in adapters.loaded):
            removed = InvalidRequest(
                f"{named('Metadata mlx.adapter')} is {shown(request.adapter)}, which was removed"
                " before the request began: send the request with another adapter, or none"
            )
            self._publish(command.ticket, removed)
            return
        constraint = command.constraint
        scoring = None if plan is None else Scoring(plan, side_by_side=self._model.batches)
        sequence = ExecutorSequence(
            number=command.ticket,
            request=request,
            prompt=command.prompt,
            limit=command.limit,
            constraint=constraint,
            scoring=scoring,
            media=media,
            stored=command.stored,
            adapter=command.adapter,
        )
        text = self._model.new_text(request.prompt.continues)
        limit = self._model.repetition_guard
        guard = RepetitionGuard(limit) if limit else None
        self._outputs[command.ticket] = Output(
            sequence, text, StopMatcher(request.stop), self._model.end_tokens, guard
        )
        if request.stream_progress:
            self._watched.add(command.ticket)
        self.executor.add(sequence)
        generates = not (request.prompt_only or (constraint is not None and constraint.ended))
        joins = generates and scoring is None
        spans = () if media is None else tuple((s.start, s.stop) for s in media.spans)
        if reads_whole := self._model.reads_whole:
            spans = ((0, len(command.prompt) - (not joins)),)
        if not joins:
            self._unstarted.add(command.ticket)
        self._events.append(
            Arrived(
                sequence=command.ticket,
                key=command.key or PrefixKey(command.prompt if media is None else media.key),
                tokens=tuple(command.prompt),
                limit=command.limit,
                spans=spans,
                whole=reads_whole or (media is not None and self._reader.whole),
                positions=command.positions if plan is None else (plan.stable,),
                on_disk=command.stored.length if command.stored else 0,
                width=1 if scoring is None else 1 + scoring.width,
                fresh=request.prompt_logprobs is not None,
                alone=reads_whole or media is not None or request.prompt_logprobs is not None,
                joins=joins,
                scores=scoring is not None,
                encodes=0 if media is None else self._reader.needs(media),
                features=0 if media is None else self._reader.bytes_per_token,
                beside=self._beside(command),
                draft_tokens=self._draft_tokens(command),
            )
        )

    def _beside(self, command: Submit) -> int:
        """Return the bytes that a sequence needs for its grammar and filters, besides its KV."""
        request = command.request
        nbytes = 0 if request.constraint is None else _MATCHER_BYTES
        if search_all(request.sampling, self._model.vocabulary):
            nbytes += (1 + self._draft_tokens(command)) * self._model.passes.per_filter
        return nbytes

    def _draft_tokens(self, command: Submit) -> int:
        """Return the maximum number of draft tokens at a time for a sequence.

        It is 0 for a prompt with media, which drafters do not read.
        """
        if self._model.drafting is None or command.media is not None:
            return 0
        requested = command.request.n_draft
        return self._model.drafting.most if requested is None else requested

    @property
    def _reader(self) -> MediaReader:
        assert self._model.media is not None, "a text model gets no media"
        return self._model.media

    def cancel(self, ticket: int) -> None:
        """End a sequence. Nothing is published, because the owner has cancelled the sequence."""
        if self._outputs.pop(ticket, None) is not None:
            self._events.append(Ended(ticket))

    def cancel_all(self, error: EngineError) -> None:
        """End every sequence with an error, and drop every cached prefix."""
        if self._model.disk is not None and any(isinstance(e, Ended) for e in self._events):
            # Answers that have just ended are saved to disk when they leave, in the next step.
            self.step()
        for ticket in self._outputs:
            self._publish(ticket, error)
        for kept in (self._outputs, self._events, self._generated, self._decoded):
            kept.clear()
        for tickets in (self._retried, self._unstarted, self._watched):
            tickets.clear()
        self._grown = 0
        self.executor.clear()
        self.planner = Planner(self.planner.limits, self.planner.pace)
        self._settle()

    def step(self) -> None:
        """Run one step: every decoding sequence gets a token, and prefill gets its share."""
        plan = self._next_plan()
        # Most steps only decode the same sequences as the step before.
        if again := plan is self._plan:
            expected = 2 * self._latest_seconds if self.planner.pace.known else None
        else:
            self._plan, self._step_name = plan, str(plan)
            expected = self._expected_seconds(plan)
        self._gauges.heartbeat.begin(self._step_name, expected=expected)
        if not again:
            if not plan.burst:
                self._deliver_early(self.executor.release())
            self._prepare(plan)
        before, began = self._began, time.perf_counter()
        self._began = began
        if started := self.executor.launch(plan):
            self._learn(started, began)
        sampled = self.executor.read()
        self._deliver(sampled)
        self._flush(until_next=began - before)
        # The next plan decides whether completed prompts wait for those that have just arrived.
        arriving = plan.burst or (not plan.decode and self._more())
        self.executor.withholds = arriving and self._model.leader is None
        self._learn(self.executor.settle(idle=not plan.decode), began, len(sampled))
        if early := self.executor.take_early():
            self._deliver_early(early)
        elif not again:  # otherwise no time has passed since the last flush
            self._flush()
        if self.executor.failures:
            self._fail_broken()
        if self._unstarted:
            self._finish_unstarted()
        if self._watched:
            self._report_progress()
        self._steps += 1
        if not again or self._events or self._steps % _TIDY_EVERY == 0:
            self._settle()

    def _prepare(self, plan: StepPlan) -> None:
        """Do the work of a new plan that comes before the launch of its step."""
        if self._model.disk is not None and plan == StepPlan(plan.number):
            # no sequence can continue until the writes are done
            self._model.disk.drain(_WRITE_WAIT)
        for refusal in plan.refuse:
            self._refuse(refusal)
        if not plan.only_decodes:
            self._flush(everything=True)

    def _expected_seconds(self, plan: StepPlan) -> float | None:
        """Return the predicted seconds of a step, with passes in flight of the step before.

        Returns None before any pass has been timed, and infinity if an image or audio may be
        encoded, because nothing predicts how long that takes.
        """
        before, self._latest_seconds = self._latest_seconds, 0.0
        sequences = self.executor.sequences
        parts = [sequences[part.sequence] for group in plan.prefill for part in group]
        if parts and any(sequence.media is not None for sequence in parts):
            self._latest_seconds = math.inf
        elif self.planner.pace.known:
            self._latest_seconds = self.planner.pace.step_seconds(plan)
        else:
            return None
        return before + self._latest_seconds

    def _now(self) -> float:
        return time.monotonic()

    def _next_plan(self) -> StepPlan:
        """Return the plan of the next step: the latest plan if it is still valid, or a new plan."""
        if not self._events:
            if self.planner.lasts(self._grown):
                return self._plan
            self._grown = max(map(len, self._generated.values()), default=0)
            if self.planner.lasts(self._grown):
                return self._plan
        events: list[PlannerEvent] = [Generated(self._generated)] if self._generated else []
        if self._decoded:
            *before, latest = self._decoded
            events.append(DecodeTimed(latest, sum(before)))
        events += self._events
        self._generated, self._decoded, self._events = defaultdict(list), [], []
        self._grown = 0
        return self.planner.plan(self._now(), events)

    def _learn(self, events: list[PlannerEvent], began: float, read: int = 0) -> None:
        """Store the events of a step for the next plan.

        began: time.perf_counter() when the step was launched.
        read: number of tokens that were read in the step.
        """
        steps, seconds = 0, 0.0
        for event in events:
            if isinstance(event, DecodeTimed):
                self._decoded.append(event.seconds)
                steps, seconds = steps + 1, seconds + event.seconds
                continue
            if isinstance(event, Started) and (output := self._outputs.get(event.sequence)):
                output.started(event.reused, began)
            self._events.append(event)
        if read and seconds:
            self._gauges.tokens_per_second = read * steps / seconds

    def _deliver(self, sampled: Sequence[Sampled]) -> None:
        """Publish the events that these tokens cause."""
        now, outputs, generated = time.perf_counter(), self._outputs, self._generated
        count = 0
        for sequence, token, logprob, broken, over in sampled:
            number = sequence.number
            if (output := outputs.get(number)) is None:
                continue
            if broken is not None:
                self._fail(number, "grammar", broken)
                continue
            try:
                events = output.take(token, logprob, over=over, at=now)
            except Exception as fault:
                self._fail(number, "text", fault)
                continue
            count += 1
            generated[number].append(token)
            if events:
                self._publish_all(number, output, events)
                count -= output.by_end_token
        self._gauges.tokens_generated += count
        # Without draft tokens, with which no plan lasts, these are at most two tokens each.
        self._grown += 2

    def _deliver_early(self, sampled: Sequence[Sampled]) -> None:
        """Publish tokens that were read outside a decode step."""
        if sampled:
            self._deliver(sampled)
            self._flush()

    def _publish_all(self, number: int, output: Output, events: Sequence[Undelivered]) -> None:
        for event in events:
            self._publish(number, event)
        if output.ended is not None:
            output.sequence.finished = True
            del self._outputs[number]
            self._events.append(Ended(number))

    def _finish_unstarted(self) -> None:
        """End the sequences that only needed their prompt or scores."""
        for number in [number for number in self._unstarted if number in self._outputs]:
            output = self._outputs[number]
            sequence = output.sequence
            if sequence.scoring is not None:
                over = sequence.scoring.done
            else:
                whole = len(sequence.history) >= len(sequence.prompt) - 1
                over = whole and sequence.rows is not None and not self.executor.in_flight(sequence)
            if over:
                self._publish_all(number, output, output.finish_unstarted())

    def _report_progress(self) -> None:
        """Publish the progress of prefill for owners that wait for a first token."""
        for number in [number for number in self._watched if number in self._outputs]:
            output = self._outputs[number]
            if output.generated:
                self._watched.discard(number)
            elif news := output.progress():
                self._publish(number, news)

    def _fail_broken(self) -> None:
        """End the sequences whose step failed; after a failed allocation, retry them once."""
        failures, self.executor.failures = self.executor.failures, []
        for failure in failures:
            if short := is_allocation_failure(failure.fault):
                self.shed()
            if not failure.sequences:
                self._report(failure.where, failure.fault)
            for number in failure.sequences:
                if short and number not in self._retried and number in self._outputs:
                    self._retried.add(number)
                    self._events.append(Lost(number))
                else:
                    self._fail(number, failure.where, failure.fault, short=short)

    def _fail(self, number: int, where: str, fault: Exception, *, short: bool = False) -> None:
        """End a sequence because of a fault, after a failed allocation if `short`."""
        if self._outputs.pop(number, None) is None:
            return
        self._events.append(Ended(number, failed=True))
        if isinstance(fault, EngineError):
            self._publish(number, fault)
            return
        self._report(where, fault)
        failed = EngineFailed(f"the model failed on this request ({type(fault).__name__})")
        self._publish(number, self._out_of_memory() if short else failed)

    def _refuse(self, refusal: Refusal) -> None:
        output = self._outputs.pop(refusal.sequence, None)
        if output is None:
            return
        limit = self._model.memory_limit // MIB
        if refusal.writing:
            error = Overloaded(
                f"{refusal.writing // MIB} MiB of memory hold prompts that have to be written to"
                " disk first, and the disk does not finish that: check the disk of"
                " prompt_cache_dir, or send a shorter prompt"
            )
        else:
            what = f"a prompt of {len(output.sequence.prompt)} tokens with its output"
            advice = "shorten the prompt, ask for fewer tokens"
            if output.generated:
                what = f"the KV cache is full after {len(output.generated)} generated tokens: it"
                advice = "ask for fewer tokens"
            error = Overloaded(
                f"{what} needs {(refusal.needed + self._model.weights_bytes) // MIB} MiB with the"
                f" model, but the limit is {limit} MiB: {advice}, or raise memory_limit_mib"
            )
        self._publish(refusal.sequence, error)

    def _out_of_memory(self) -> Overloaded:
        return Overloaded(
            "the device is out of memory, and nothing is left to evict:"
            f" {mx.get_active_memory() // MIB} MiB are in use of"
            f" {self._model.memory_limit // MIB} MiB: ask again later, shorten the prompt, or"
            " load the model with a smaller memory_limit_mib or fewer parallel requests"
        )

    def _settle(self) -> None:
        """Update the gauges; when nothing is running, return freed buffers to the system."""
        for numbers in (self._retried, self._unstarted, self._watched):
            numbers.intersection_update(self._outputs)
        gauges = self._gauges
        gauges.running = len(self.planner.sequences.admitted)
        gauges.prompt_tokens_processed += self.executor.prompt_tokens
        self.executor.prompt_tokens = 0
        gauges.preemptions = self.planner.preemptions
        self._show_drafting()
        self.remove_adapters()
        unstored = self.planner.entries.unstored
        if unstored.bit_length() > gauges.unstored.bit_length():  # at 1, 2, 4, 8 …
            _log.warning(
                "the KV of %d answers was larger than the whole prompt cache (%d MiB) and is not"
                " stored: their next turns are computed from the beginning; raise prompt_cache_mib",
                unstored,
                self._model.prompt_cache_bytes // MIB,
            )
        gauges.unstored = unstored
        if not self.busy:
            gauges.tokens_per_second = 0.0
            self.executor.rest()
        if not self.busy or self._steps % _TIDY_EVERY == 0:
            return_buffers()

    def _show_drafting(self) -> None:
        drafting, report = self._model.drafting, self.planner.widths.report
        if drafting is not None and report is not self._draft_report:
            self._draft_report = report
            self._gauges.drafting = replace(report, drafters=drafting.names)

    def shed(self) -> None:
        """Drop the prompt cache and freed buffers, because an allocation failed."""
        self._events.append(MemoryShort())
        return_buffers()

    def lend(self, nbytes: int) -> int:
        """Return the bytes that a batch of texts to embed may use now.

        nbytes: bytes that the batch needs, for which later steps free memory.
        """
        free_for_texts = self.planner.free_for_texts
        self.executor.lacking_bytes = nbytes if nbytes > free_for_texts else 0
        self._events += self.executor.other_memory_events()
        return free_for_texts

    @property
    def model(self) -> EngineModel:
        return self._model

    def count_adapters(self, nbytes: int) -> None:
        """Count `nbytes` as the bytes of all adapters from which requests choose.

        Cached prefixes are evicted for them. Raises Overloaded if sequences use the memory, and
        ModelRejected if they would not fit without any.
        """
        more = nbytes - self._adapter_bytes
        budget = self.planner.limits.budget
        if more > max(budget, 0):
            raise ModelRejected(
                f"the adapters take {nbytes // MIB} MiB, but the memory limit of"
                f" {self._model.memory_limit // MIB} MiB leaves"
                f" {(budget + self._adapter_bytes) // MIB} MiB beside the model:"
                " name fewer adapters, or raise memory_limit_mib"
            )
        if not self.planner.reserve(more):
            raise Overloaded(
                f"the adapters take {more // MIB} MiB more, which running requests use: try again"
                " when they are done, or raise memory_limit_mib"
            )
        self._adapter_bytes = nbytes
        self._model.weights_bytes += more
        if self._model.adapters is not None:
            self._model.passes.adapted = self._model.adapters.token_bytes
        if not self.busy:
            self.step()

    def remove_adapters(self) -> None:
        """Remove the adapters from memory that no request may choose and no sequence uses."""
        adapters = self._model.adapters
        if adapters is None or not adapters.unnamed:
            return
        from backend.engine.loading.row_adapters import remove

        used = {sequence.adapter for sequence in self.executor.sequences.values()}
        if unused := adapters.unnamed - used:
            try:
                remove(self._model.model, adapters, unused)
            except Exception as fault:  # the next call tries again
                self._report("the removal of an adapter", fault)
            else:
                self.count_adapters(adapters.nbytes)

    def memory(self) -> dict[str, int]:
        """Return the bytes that MLX uses for this model besides the weights, by purpose."""
        parts = self.executor.memory()
        if self._model.experts is not None:
            parts["expert_cache"] = self._model.experts.nbytes
        if self._model.adapters is not None:
            parts["adapters"] = self._adapter_bytes
        return parts


def _executor_of(model: EngineModel) -> Executor:
    """Return the executor of a model. Modules for ranks are loaded only if there are ranks."""
    if model.leader is None:
        return Executor(model)
    from backend.engine.ranks.leading_executor import LeadingExecutor

    return LeadingExecutor(model, model.leader)
