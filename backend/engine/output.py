"""What one sequence has produced: its text, its end, and the events for its owner."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backend.engine.events import (
    Event,
    Finished,
    FinishReason,
    Progress,
    PromptLogprobs,
    TextDelta,
    TokenLogprob,
    Usage,
)
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.repetition import RepetitionGuard
from backend.engine.token_text import TextStream
from common.stop_strings import StopMatcher


@dataclass(eq=False, slots=True)
class Output:
    """The answer of one sequence. ended: its finish reason; None while it runs.

    guard: ends a repetitive answer. reused: prompt tokens whose KV was computed earlier.
    """

    sequence: ExecutorSequence
    text: TextStream
    stop: StopMatcher
    guard: RepetitionGuard | None = None
    clock: Callable[[], float] = time.perf_counter
    reused: int = 0
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: FinishReason | None = None
    _delivered_logprobs: int = 0
    _processed: int = 0
    _started_at: float = 0.0
    _first_token_at: float = 0.0
    _last_token_at: float = 0.0

    def started(self, reused: int) -> None:
        """Record the admission. A sequence that restarts after a preemption keeps its figures."""
        if not self._started_at:
            self._started_at = self.clock()
            self.reused = reused

    def usage(self) -> Usage:
        first = self._first_token_at or self.clock()
        return Usage(
            prompt_tokens=len(self.sequence.prompt),
            cached_tokens=self.reused,
            completion_tokens=len(self.generated),
            prefill_ms=(first - self._started_at) * 1e3,
            decode_ms=(self._last_token_at - first) * 1e3 if self._first_token_at else 0.0,
        )

    def progress(self) -> Progress | None:
        """The prompt progress, if it has changed and the owner has requested it."""
        processed = min(len(self.sequence.history), len(self.sequence.prompt))
        if self.generated or processed <= self._processed:
            return None
        self._processed = processed
        return Progress(self.usage(), processed)

    def finish_unstarted(self) -> Sequence[Event]:
        """The end of a sequence that generates no token.

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
    ) -> Sequence[Event]:
        """Account for one generated token; returns the events for its owner, in order.

        over: whether the sequence's grammar ends with this token; the sequence then needs no
        end-of-sequence token. An end-of-sequence token is not counted: a natural stop at the limit
        has the finish reason `stop`, as in LocalAI's llama.cpp backend.
        """
        request = self.sequence.request
        self._last_token_at = self.clock()
        self._first_token_at = self._first_token_at or self._last_token_at
        if token in end_tokens and not request.ignore_eos:
            return self._end("stop", self.stop.feed(self.text.finish()) + self.stop.finish())
        self.generated.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        shown = self.stop.feed(self.text.add(token))
        if self.stop.stopped:
            return self._end("stop", shown)
        if over:
            shown += self.stop.feed(self.text.finish()) + self.stop.finish()
            return self._end("stop", shown)
        if self.guard is not None and self.guard.repeats(token):
            shown += self.stop.feed(self.text.finish()) + self.stop.finish()
            return self._end("stop", shown, repeated=True)
        if len(self.generated) >= self.sequence.limit:
            shown += self.stop.feed(self.text.finish())
            reason: FinishReason = "stop" if self.stop.stopped else "length"
            return self._end(reason, shown + self.stop.finish())
        return (self._delta(shown, self.usage()),) if shown else ()

    def _end(self, reason: FinishReason, shown: str, *, repeated: bool = False) -> Sequence[Event]:
        self.ended = reason
        usage = self.usage()
        request, scoring = self.sequence.request, self.sequence.scoring
        last = Finished(
            reason,
            usage,
            None if request.logprobs is None else tuple(self.logprobs),
            self.stop.found,
            self._of_prompt(),
            () if scoring is None else scoring.results(),
            repeated,
        )
        return (self._delta(shown, usage), last) if shown else (last,)

    def _delta(self, shown: str, usage: Usage) -> TextDelta:
        logprobs = tuple(self.logprobs[self._delivered_logprobs :])
        self._delivered_logprobs = len(self.logprobs)
        return TextDelta(shown, usage, logprobs)

    def _of_prompt(self) -> PromptLogprobs | None:
        if self.sequence.request.prompt_logprobs is None:
            return None
        return PromptLogprobs(self.sequence.prompt[0], tuple(self.sequence.prompt_logprobs))
