"""The answer of one sequence: its text, its end, and the events for its owner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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
from backend.engine.token_text import TextStream
from common.stop_strings import StopMatcher

_LONGEST_STRETCH = 256  # tokens


@dataclass(eq=False, slots=True)
class _Totals:
    """The running totals of one answer.

    They are a separate object, because text that waits for delivery refers to them: a reference to
    the answer would leave its KV in memory.
    """

    prompt_tokens: int
    generated: Sequence[int]
    cached_tokens: int = 0
    started_at: float = 0.0
    first_token_at: float = 0.0

    def usage(self) -> Usage:
        now = time.perf_counter()
        first = self.first_token_at or now
        return Usage(
            self.prompt_tokens,
            self.cached_tokens,
            len(self.generated),
            (first - self.started_at) * 1e3,
            (now - first) * 1e3,
        )


@dataclass(eq=False, slots=True)
class Output:
    """The answer of one sequence.

    end_tokens: the model's end tokens.
    guard: ends a repetitive answer.
    ended: the finish reason; None while the answer is incomplete.
    by_end_token: whether an end token, which does not count, ended the answer.
    """

    sequence: ExecutorSequence
    text: TextStream
    stop: StopMatcher
    end_tokens: frozenset[int] = frozenset()
    guard: RepetitionGuard | None = None
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: FinishReason | None = None
    by_end_token: bool = False
    _ends: frozenset[int] = field(init=False)  # tokens that may end the answer
    _limit: int = field(init=False)
    _totals: _Totals = field(init=False)
    _shown: GrowingText | None = None  # the latest text
    _shown_logprobs: int = 0
    _processed: int = 0

    def __post_init__(self) -> None:
        self._ends = self.end_tokens.union(self.sequence.request.stop_tokens)
        self._limit = self.sequence.limit
        self._totals = _Totals(len(self.sequence.prompt), self.generated)

    def started(self, reused: int, at: float) -> None:
        """Record the first admission; admissions after a preemption change nothing.

        reused: prompt tokens whose KV was computed earlier.
        at: time.perf_counter() when the step was launched.
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
        logprob: TokenLogprob | None = None,
        *,
        over: bool = False,
        at: float = 0.0,
    ) -> Sequence[Undelivered]:
        """Add one generated token; returns the new events for the owner, in order.

        Text is added to earlier text that has not been delivered, and is then not returned. An
        end-of-sequence token is not counted: if it is generated at the limit, the finish reason is
        `stop`, as in LocalAI's llama.cpp backend.
        over: whether the sequence's grammar ends with this token; no end-of-sequence token follows.
        at: time.perf_counter() when the token was read.
        """
        generated = self.generated
        if not generated:
            self._totals.first_token_at = self._totals.first_token_at or at
        if token in self._ends and self._may_end_with(token):
            self.by_end_token = True
            shown = self.stop.feed(self.text.finish()) + self.stop.finish()
            return self._end("stop", shown, cut=token not in self.end_tokens)
        generated.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        shown = self.text.add(token)
        if self.stop.strings:
            shown = self.stop.feed(shown)
            if self.stop.found:
                return self._end("stop", shown)
        if over:
            shown += self.stop.feed(self.text.finish()) + self.stop.finish()
            return self._end("stop", shown)
        if self.guard is not None and self.guard.repeats(token):
            shown += self.stop.feed(self.text.finish()) + self.stop.finish()
            return self._end("stop", shown, repeated=True)
        if len(generated) >= self._limit:
            shown += self.stop.feed(self.text.finish())
            reason: FinishReason = "stop" if self.stop.found else "length"
            return self._end(reason, shown + self.stop.finish())
        return self._show(shown) if shown else ()

    def _may_end_with(self, token: int) -> bool:
        request = self.sequence.request
        if token in request.stop_tokens and len(self.generated) >= request.min_tokens:
            return True
        return token in self.end_tokens and not request.ignore_eos

    def _end(
        self, reason: FinishReason, shown: str, *, repeated: bool = False, cut: bool = False
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
            cut or repeated or bool(self.stop.found),
        )
        return *(self._show(shown) if shown else ()), last

    def _show(self, shown: str) -> Sequence[GrowingText]:
        """Add text to the text that waits for delivery; returns a new event if none waits."""
        text = self._shown
        new: Sequence[GrowingText] = ()
        if text is None or text.closed:
            text = self._shown = GrowingText(self._totals.usage, [], [])
            new = (text,)
        text.pieces.append((shown, len(self.generated)))
        if self.logprobs:
            text.logprobs += self.logprobs[self._shown_logprobs :]
            self._shown_logprobs = len(self.logprobs)
        return new

    def _of_prompt(self) -> PromptLogprobs | None:
        if self.sequence.request.prompt_logprobs is None:
            return None
        return PromptLogprobs(self.sequence.prompt[0], tuple(self.sequence.prompt_logprobs))


class RepetitionGuard:
    """Detects that the answer of one sequence repeats the same tokens without end.

    A sequence repeats with period n while every token equals the token n positions earlier. One
    counter for each n is enough, so a token costs one comparison of two short arrays.
    limit: number of repeated tokens in a row at which the sequence should end.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._latest = np.full(_LONGEST_STRETCH, -1, dtype=np.int64)  # the newest token first
        self._repeated = np.zeros(_LONGEST_STRETCH, dtype=np.int64)

    def repeats(self, token: int) -> bool:
        """Add a token; returns whether the last `limit` tokens repeat those before them."""
        self._repeated = np.where(self._latest == token, self._repeated + 1, 0)
        self._latest[1:] = self._latest[:-1]
        self._latest[0] = token
        return bool(self._repeated.max() >= self._limit)
