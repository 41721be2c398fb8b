"""Scores continuations of one prefix on the engine thread, in passes of limited length.

The prefix is prefilled once. Its last token is run once for all continuations, because its logits
give the probabilities of their first tokens. Then as many continuations as fit in memory run side
by side on copies of that KV, the longest first, so that those of a batch have similar lengths.
Padding is at the end, where causal attention ignores it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.errors import NotFinite
from backend.engine.events import TokenLogprob
from backend.engine.executing.score_plan import ScorePlan
from backend.engine.sampling.logprobs import BatchLogprobs

# 64 MiB of float32: those of a whole prompt would take gigabytes.
_MOST_LOGITS = 1 << 24
WIDEST = 32  # continuations that run side by side


@dataclass(slots=True)
class _Rectangle:
    """Continuations of a plan that run side by side, `fed` tokens of each so far."""

    places: Sequence[int]
    cache: kv.BatchCache
    fed: int = 0


class Scoring:
    """The progress of one plan; `width` continuations run side by side."""

    def __init__(self, plan: ScorePlan, *, side_by_side: bool) -> None:
        self._plan = plan
        longer = [
            at for at, continuation in enumerate(plan.continuations) if len(continuation.tokens) > 1
        ]
        self.width = min(max(len(longer), 1), WIDEST) if side_by_side else 1
        self._longer = sorted(longer, key=lambda at: -len(plan.continuations[at].tokens))
        self.restart()

    def restart(self, width: int | None = None) -> None:
        """Start again after the row has lost its KV, with another width if one is given."""
        self.width = width or self.width
        self._values: list[list[float]] = [[] for _ in self._plan.continuations]
        self._waiting = list(self._longer)
        self._rectangle: _Rectangle | None = None
        self._begun = False

    @property
    def plan(self) -> ScorePlan:
        return self._plan

    @property
    def done(self) -> bool:
        return self._begun and self._rectangle is None and not self._waiting

    @property
    def nbytes(self) -> int:
        """Bytes of the continuations' KV."""
        return self._rectangle.cache.nbytes if self._rectangle is not None else 0

    def results(self) -> tuple[tuple[TokenLogprob, ...], ...]:
        """Return each candidate's tokens with their natural log-probabilities."""
        return tuple(
            tuple(
                map(
                    TokenLogprob,
                    continuation.tokens[continuation.scored_from :],
                    values[continuation.scored_from :],
                )
            )
            for continuation, values in zip(self._plan.continuations, self._values, strict=True)
        )

    def step(self, model: Any, vocabulary: int, row: kv.RowCache, budget: int) -> tuple[int, int]:
        """Run at most `budget` tokens; returns how many ran, with and without padding.

        row: the KV of the prefix without its last token, which the first call adds.
        """
        if not self._begun:
            self._begin(model, row)
            return 1, 1
        if self._rectangle is None:
            places, self._waiting = self._waiting[: self.width], self._waiting[self.width :]
            self._rectangle = _Rectangle(places, kv.BatchCache([kv.clone(row)] * len(places)))
        return self._run(model, vocabulary, self._rectangle, budget)

    def _begin(self, model: Any, row: kv.RowCache) -> None:
        logits = model(mx.array([self._plan.prefix[-1:]]), cache=row)[0, -1]
        firsts = [
            continuation.tokens[0] if continuation.tokens else 0
            for continuation in self._plan.continuations
        ]
        values = _values(logits)[mx.array(firsts)]
        mx.eval(values)
        kv.evaluate(row)
        numbers = cast(list[float], values.tolist())
        _require_numbers(numbers)
        for at, value in enumerate(numbers):
            if self._plan.continuations[at].tokens:
                self._values[at].append(value)
        self._begun = True

    def _run(
        self, model: Any, vocabulary: int, rectangle: _Rectangle, budget: int
    ) -> tuple[int, int]:
        texts = [self._plan.continuations[at].tokens for at in rectangle.places]
        height = len(texts)
        start, last = rectangle.fed, max(map(len, texts)) - 1
        most = min(budget, longest_chunk(vocabulary)) // height
        end = min(start + max(most, 1), last)
        tokens, following = (
            kv.padded([text[at : at + end - start] for text in texts]) for at in (start, start + 1)
        )
        logits = model(tokens, cache=rectangle.cache.layers)
        values = mx.take_along_axis(_values(logits), following[..., None], axis=-1)[..., 0]
        mx.eval(values)
        kv.evaluate(rectangle.cache.layers)
        read = 0
        for at, text, line in zip(
            rectangle.places, texts, cast(list[list[float]], values.tolist()), strict=True
        ):
            own = max(min(end, len(text) - 1) - start, 0)
            _require_numbers(line[:own])
            self._values[at] += line[:own]
            read += own
        rectangle.fed = end
        if end == last:
            self._rectangle = None
        return height * (end - start), read


def _values(logits: mx.array) -> mx.array:
    wide = logits.astype(mx.float32)
    return wide - mx.logsumexp(wide, axis=-1, keepdims=True)


def _require_numbers(values: Sequence[float]) -> None:
    if any(map(math.isnan, values)):
        raise NotFinite


def longest_chunk(vocabulary: int) -> int:
    """Return the maximum number of tokens whose logits are computed at once."""
    return max(_MOST_LOGITS // vocabulary, 1)


def prompt_logprobs(
    logits: mx.array, following: Sequence[int], alternatives: int
) -> list[TokenLogprob]:
    """Return the log-probability of the next token at each position of a chunk.

    logits: [positions, vocabulary].
    following: the next token at each position.
    alternatives: how many of the likeliest tokens to return at each position.
    """
    logprobs = BatchLogprobs([alternatives] * len(following))
    computed = logprobs(logits, mx.array(list(following)))
    entries = logprobs.read(computed, following)
    return [entries[position] for position in range(len(following))]
