"""What one sequence has produced: its text, its end, and the events for its owner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from backend.engine.events import (
    Finished,
    FinishReason,
    GrowingText,
    Progress,
    PromptLogprobs,
    TokenLogprob,
    Undelivered,
    Usage,
)
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.repetition import RepetitionGuard
from backend.engine.token_text import TextStream
from common.stop_strings import StopMatcher


@dataclass(eq=False, slots=True)
class _Totals:
    """The running totals of one answer.

    Text that waits for delivery refers to them, not to the answer, which would keep the answer's KV
    in memory.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    started_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    def usage(self) -> Usage:
        first = self.first_token_at or time.perf_counter()
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            prefill_ms=(first - self.started_at) * 1e3,
            decode_ms=(self.last_token_at - first) * 1e3 if self.first_token_at else 0.0,
        )


@dataclass(eq=False, slots=True)
class Output:
    """The answer of one sequence. ended: its finish reason; None while it runs.

    guard: ends a repetitive answer.
    """

    sequence: ExecutorSequence
    text: TextStream
    stop: StopMatcher
    guard: RepetitionGuard | None = None
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: FinishReason | None = None
    _totals: _Totals = field(init=False)
    _shown: GrowingText | None = None  # the latest text
    _shown_logprobs: int = 0
    _processed: int = 0

    def __post_init__(self) -> None:
        self._totals = _Totals(len(self.sequence.prompt))

    def started(self, reused: int, at: float) -> None:
        """Record the first admission; later ones, after a preemption, change nothing.

        reused: prompt tokens whose KV was computed earlier.
        at: time.perf_counter() of the launch.
        """
        if not self._totals.started_at:
            self._totals.started_at = at
            self._totals.cached_tokens = reused

    def progress(self) -> Progress | None:
        """Return the prompt progress, if it has changed and the owner has requested it."""
        processed = min(len(self.sequence.history), len(self.sequence.prompt))
        if self.generated or processed <= self._processed:
            return None
        self._processed = processed
        return Progress(self._totals.usage(), processed)

    def finish_unstarted(self) -> Sequence[Undelivered]:
        """Return the end of a sequence that generates no token.

        Either only its prompt was requested, or its grammar matches nothing but the empty text.
        """
        return self._end("length" if self.sequence.request.prompt_only else "stop", "")

    def take(
        self,
        token: int,
        end_tokens: frozenset[int],
        logprob: TokenLogprob | None = None,
        *,
        over: bool = False,
        at: float = 0.0,
    ) -> Sequence[Undelivered]:
        """Account for one generated token; returns what is new for its owner, in order.

        Text is added to earlier text that has not been delivered, and is then not returned.

        over: whether the sequence's grammar ends with this token; the sequence then needs no
        end-of-sequence token. An end-of-sequence token is not counted: a natural stop at the limit
        has the finish reason `stop`, as in LocalAI's llama.cpp backend. at: time.perf_counter() of
        the read.
        """
        request = self.sequence.request
        totals = self._totals
        totals.last_token_at = at
        if not totals.first_token_at:
            totals.first_token_at = at
        stopped = token in request.stop_tokens and len(self.generated) >= request.min_tokens
        if stopped or (token in end_tokens and not request.ignore_eos):
            return self._end("stop", self.stop.feed(self.text.finish()) + self.stop.finish())
        self.generated.append(token)
        totals.completion_tokens = count = len(self.generated)
        if logprob is not None:
            self.logprobs.append(logprob)
        shown = self.stop.feed(self.text.add(token))
        if self.stop.found:
            return self._end("stop", shown)
        if over:
            shown += self.stop.feed(self.text.finish()) + self.stop.finish()
            return self._end("stop", shown)
        if self.guard is not None and self.guard.repeats(token):
            shown += self.stop.feed(self.text.finish()) + self.stop.finish()
            return self._end("stop", shown, repeated=True)
        if count >= self.sequence.limit:
            shown += self.stop.feed(self.text.finish())
            reason: FinishReason = "stop" if self.stop.stopped else "length"
            return self._end(reason, shown + self.stop.finish())
        return self._show(shown)

    def _end(
        self, reason: FinishReason, shown: str, *, repeated: bool = False
    ) -> Sequence[Undelivered]:
        self.ended = reason
        request, scoring = self.sequence.request, self.sequence.scoring
        last = Finished(
            reason,
            self._totals.usage(),
            None if request.logprobs is None else tuple(self.logprobs),
            self.stop.found,
            self._of_prompt(),
            () if scoring is None else scoring.results(),
            repeated,
        )
        return *self._show(shown), last

    def _show(self, shown: str) -> Sequence[GrowingText]:
        if not shown:
            return ()
        new: Sequence[GrowingText] = ()
        if self._shown is None or self._shown.closed:
            self._shown = GrowingText(self._totals.usage, [], [])
            new = (self._shown,)
        self._shown.pieces.append((shown, len(self.generated)))
        if self.logprobs:
            self._shown.logprobs += self.logprobs[self._shown_logprobs :]
            self._shown_logprobs = len(self.logprobs)
        return new

    def _of_prompt(self) -> PromptLogprobs | None:
        if self.sequence.request.prompt_logprobs is None:
            return None
        return PromptLogprobs(self.sequence.prompt[0], tuple(self.sequence.prompt_logprobs))
