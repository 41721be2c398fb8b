"""A smaller model that reads the same tokens and drafts the next ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.drafting.batch_drafter import LEAST_PROBABILITY, BatchDrafter, Choices
from backend.engine.drafting.drafter import DraftRequest
from backend.engine.planning.draft_width import CATCH_UP, NEAR
from backend.engine.planning.pace import Pace
from backend.engine.sampling.logits_head import LogitsHead
from common.prefixes import common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A loaded draft model."""

    model: Any
    # Number of logits of the draft model and of the main model, which may have different padding.
    vocabulary: int
    main_vocabulary: int
    longest: int  # the draft model's context in tokens
    # Its output projection, which computes one token per row; None if all logits are computed.
    head: LogitsHead | None = None


class ModelDrafter(BatchDrafter):
    """A `Drafter` with a draft model.

    Draft tokens are the draft model's likeliest tokens, up to the first whose probability is too
    low. A sequence that is new, or had no draft tokens for a long time, catches up alone before it
    joins the others: each call prefills a chunk of one such sequence. `pace` sets the chunk's
    length.
    """

    def __init__(
        self, draft: DraftModel, pace: Pace, least_probability: float = LEAST_PROBABILITY
    ) -> None:
        choices = Choices(lambda logits: logits, draft.main_vocabulary)
        super().__init__(draft.model, choices, least_probability)
        self._draft = draft
        self._pace = pace
        self._cached: dict[int, int] = {}  # by sequence, how many of its tokens are in its KV
        self._behind: dict[int, kv.RowCache] = {}  # the KV of sequences that catch up, in order

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(map(kv.nbytes, self._behind.values()))

    def forget(self, sequences: Collection[int]) -> None:
        super().forget(sequences)
        for sequence in sequences:
            self._cached.pop(sequence, None)
            self._behind.pop(sequence, None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int] | None]:
        able = {request.sequence: request for request in requests if self._can_follow(request)}
        self.forget([request.sequence for request in requests if request.sequence not in able])
        self._drop_wrong_drafts(able)
        self._catch_up(able)
        found = self._next_drafts(able)
        return [
            found.get(request.sequence) if request.sequence in able else [] for request in requests
        ]

    def _can_follow(self, request: DraftRequest) -> bool:
        """Return whether the draft model knows the new token ids and has context for another."""
        new = request.tokens[self._cached.get(request.sequence, 0) :]
        return (
            len(request.tokens) < self._draft.longest
            and max(new, default=0) < self._draft.vocabulary
        )

    def _drop_wrong_drafts(self, requests: dict[int, DraftRequest]) -> None:
        """Truncate the KV after the draft tokens that were right, and before the last token."""
        dropped = [0] * len(self._sequences)
        for at, number in enumerate(self._sequences):
            if number in requests:
                tokens, cached = requests[number].tokens, self._cached[number]
                drafted = self._drafted.pop(number, [])
                right = common_prefix(drafted, tokens[cached:])
                self._cached[number] = min(cached + right, len(tokens) - 1)
                dropped[at] = cached + len(drafted) - self._cached[number]
        self._cache.drop(dropped)

    def _catch_up(self, requests: dict[int, DraftRequest]) -> None:
        """Prefill a chunk of one sequence that misses tokens; add those that miss few."""
        for number in requests:
            new = self._cached.setdefault(number, 0) == 0
            if number not in self._behind and (new or self._missing(requests[number]) > NEAR):
                self._behind[number] = self._take_out(number)
        behind = [requests[number] for number in self._behind if number in requests]
        for request in behind[:1]:
            self._feed(request)
        ready = [request.sequence for request in behind if self._missing(request) <= NEAR]
        if ready:
            self._join({number: self._behind.pop(number) for number in ready})

    def _missing(self, request: DraftRequest) -> int:
        """Return how many of a sequence's tokens are not in its KV."""
        return len(request.tokens) - self._cached[request.sequence]

    def _feed(self, request: DraftRequest) -> None:
        number, row = request.sequence, self._behind[request.sequence]
        most = min(self._pace.tokens(running=True), CATCH_UP)
        chunk = request.tokens[self._cached[number] : -1][:most]
        if chunk:
            started = time.perf_counter()
            self._head(mx.array([chunk]), cache=row)
            kv.evaluate(row)
            self._pace.measured(len(chunk), time.perf_counter() - started)
            self._cached[number] += len(chunk)

    def _next_drafts(self, requests: dict[int, DraftRequest]) -> dict[int, list[int]]:
        most: dict[int, int] = {}
        first: list[Sequence[int]] = []
        for number in self._sequences:
            request = requests.get(number)
            first.append([] if request is None else request.tokens[self._cached[number] :])
            if request is not None:
                most[number] = min(request.most, self._draft.longest - len(request.tokens))
        found = self._draft_in_turn(first, most, self._run)
        self._cached |= {number: len(requests[number].tokens) for number in most}
        return found

    def _last(self, run: Callable[[], mx.array], counts: Sequence[int]) -> mx.array:
        if self._draft.head is None:
            return super()._last(run, counts)
        return self._draft.head.last(run, counts)[:, None]
