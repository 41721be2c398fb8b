"""One request on the engine thread: its tokens, its place, and the text it has produced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backend.engine.constraints.constraint import Constraint
from backend.engine.disk_cache.cache import StoredPrefix
from backend.engine.events import (
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
    TextDelta,
    TokenLogprob,
    Usage,
)
from backend.engine.request import GenerationRequest
from backend.engine.scoring import Scoring
from backend.engine.token_text import TextStream
from common.stop_strings import StopMatcher

if TYPE_CHECKING:
    from backend.engine.siblings import Sibling
    from backend.engine.vision.plan import MediaPlan
    from backend.engine.vision.prefill import MediaPrefill


@dataclass(eq=False, slots=True)
class Row:
    """A request with its prompt in tokens.

    ticket: names the request towards its owner. limit: most tokens to generate, at least 1.
    constraint: the state of its grammar. stored: a prefix that was read from disk. scoring: what
    is done with the prompt in place of going on from it. stable: how many prompt tokens later
    prompts share; 0: unknown. media: the images and sounds among its prompt's tokens, and
    media_prefill, what reads them. cache: its own KV while it is prefilled; `filled` prompt tokens
    are in it. checkpoints: prompt lengths at which a copy of the cache is stored. sibling: whose
    prefill it waits for.
    """

    ticket: int
    request: GenerationRequest
    prompt: Sequence[int]
    limit: int
    text: TextStream
    stop: StopMatcher
    constraint: Constraint | None = None
    stored: StoredPrefix | None = None
    scoring: Scoring | None = None
    stable: int = 0
    media: MediaPlan | None = None
    media_prefill: MediaPrefill | None = None
    clock: Callable[[], float] = time.perf_counter
    cache: list[Any] | None = None
    filled: int = 0
    reused: int = 0
    checkpoints: tuple[int, ...] = ()
    sibling: Sibling | None = None
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: FinishReason | None = None
    _told: int = 0
    _admitted_at: float = 0.0
    _first_token_at: float = 0.0
    _last_token_at: float = 0.0

    @property
    def key(self) -> Sequence[int]:
        """The prompt as caches compare it: media by their content, the rest by its tokens."""
        return self.prompt if self.media is None else self.media.key

    def key_of(self, held: Sequence[int]) -> Sequence[int]:
        """The same of tokens that begin with the prompt, or with a part of it."""
        if self.media is None:
            return held
        key = self.media.key
        return (*key[: len(held)], *held[len(key) :])

    def whole_media(self, length: int) -> int:
        """The longest prefix of at most `length` tokens that cuts through no image or sound."""
        return length if self.media is None else self.media.before(length)

    @property
    def longest(self) -> int:
        """Tokens of prompt and output together, at most."""
        return len(self.prompt) + self.limit

    @property
    def width(self) -> int:
        """How many rows of KV it holds at most."""
        return 1 if self.scoring is None else 1 + self.scoring.width

    @property
    def prefilled(self) -> bool:
        """Whether all is done that comes before decoding."""
        whole = self.filled == len(self.prompt) - 1
        return whole and (self.scoring is None or self.scoring.done)

    def read_media(self) -> None:
        """The whole prompt is in the KV: what its media came from is of no use any more."""
        self.media_prefill = None
        if self.media is not None:
            self.media.release()

    def admit(self) -> None:
        self._admitted_at = self.clock()

    def restart(self) -> None:
        """Give the KV back and be ready to be admitted again."""
        self.cache, self.filled, self.reused, self.checkpoints = None, 0, 0, ()
        self.media_prefill = None
        self.prompt_logprobs.clear()
        if self.scoring is not None:
            self.scoring.restart()

    def usage(self) -> Usage:
        first = self._first_token_at or self.clock()
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.reused,
            completion_tokens=len(self.generated),
            prefill_ms=(first - self._admitted_at) * 1e3,
            decode_ms=(self._last_token_at - first) * 1e3 if self._first_token_at else 0.0,
        )

    def finish_unstarted(self) -> Sequence[Event]:
        """The end of a row whose prompt was all there was to do, or of one whose grammar matches
        the empty text and nothing else."""
        return self._end("length" if self.request.prompt_only else "stop", "")

    def take(
        self, token: int, end_tokens: frozenset[int], logprob: TokenLogprob | None = None
    ) -> Sequence[Event]:
        """Account for one generated token; returns what its owner should hear, in order.

        The end-of-sequence token is not counted: a natural stop at the limit stays a stop
        (contract 4.6.1). A row whose grammar has come to its end needs none.
        """
        self._last_token_at = self.clock()
        self._first_token_at = self._first_token_at or self._last_token_at
        if token in end_tokens and not self.request.ignore_eos:
            return self._end("stop", self.stop.feed(self.text.finish()) + self.stop.finish())
        self.generated.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        shown = self.stop.feed(self.text.add(token))
        if self.stop.stopped:
            return self._end("stop", shown)
        if self.constraint is not None and self.constraint.ended:
            return self._end(
                "stop", shown + self.stop.feed(self.text.finish()) + self.stop.finish()
            )
        if len(self.generated) >= self.limit:
            shown += self.stop.feed(self.text.finish())
            reason: FinishReason = "stop" if self.stop.stopped else "length"
            return self._end(reason, shown + self.stop.finish())
        return (self._delta(shown, self.usage()),) if shown else ()

    def _end(self, reason: FinishReason, shown: str) -> Sequence[Event]:
        self.ended = reason
        usage = self.usage()
        last = Finished(
            reason,
            usage,
            None if self.request.logprobs is None else tuple(self.logprobs),
            self.stop.found,
            self._of_prompt(),
            () if self.scoring is None else self.scoring.results(),
        )
        return (self._delta(shown, usage), last) if shown else (last,)

    def _delta(self, shown: str, usage: Usage) -> TextDelta:
        logprobs = tuple(self.logprobs[self._told :])
        self._told = len(self.logprobs)
        return TextDelta(shown, usage, logprobs)

    def _of_prompt(self) -> PromptLogprobs | None:
        if self.request.prompt_logprobs is None:
            return None
        return PromptLogprobs(self.prompt[0], tuple(self.prompt_logprobs))
