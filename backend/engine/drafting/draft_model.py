"""A smaller model that reads the same tokens and guesses the next ones."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.drafting.batch_guesser import LEAST_PROBABILITY, NEAR, BatchGuesser, Choices
from backend.engine.drafting.drafter import GuessRequest
from backend.engine.planning.pace import Pace
from backend.engine.planning.plan import CacheCost
from common.prefixes import common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A loaded draft model.

    vocabulary: width of its logits. main_vocabulary: width of the main model's logits; padding may
    make them differ. longest: the draft model's own context, in tokens. cost: of its KV per
    sequence.
    """

    name: str
    model: Any
    vocabulary: int
    main_vocabulary: int
    longest: int
    weights_bytes: int
    cost: CacheCost


@dataclass(eq=False, slots=True)
class _DraftSequence:
    """A sequence in the draft model's KV. cached: its tokens there; guessed: guesses after those.

    row: its own KV while it catches up; None once it is in the batch.
    """

    row: kv.RowCache | None
    cached: int = 0
    guessed: list[int] = field(default_factory=list)


class ModelGuesser(BatchGuesser):
    """A `Guesser` with a draft model.

    Guesses are the draft model's best tokens, up to the first whose probability is too low. A
    sequence that is new, or had no guesses for a long time, first catches up alone: each call
    prefills a chunk of one such sequence, whose length `pace` sets, until it can join the others.
    """

    def __init__(
        self, draft: DraftModel, pace: Pace, least_probability: float = LEAST_PROBABILITY
    ) -> None:
        choices = Choices(lambda logits: logits, draft.main_vocabulary)
        super().__init__(draft.model, choices, least_probability)
        self._draft = draft
        self._pace = pace
        self._known: dict[int, _DraftSequence] = {}

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(kv.nbytes(one.row or []) for one in self._known.values())

    def forget(self, sequences: Collection[int]) -> None:
        super().forget(sequences)
        for sequence in sequences:
            self._known.pop(sequence, None)

    def propose(self, requests: Sequence[GuessRequest]) -> list[list[int] | None]:
        able = {one.sequence: one for one in requests if self._can_follow(one)}
        self.forget([one.sequence for one in requests if one.sequence not in able])
        self._drop_wrong_guesses(able)
        self._catch_up(able)
        found = self._guess(able)
        return [found.get(one.sequence) if one.sequence in able else [] for one in requests]

    def _can_follow(self, one: GuessRequest) -> bool:
        """Whether the draft model knows all these token ids and has room for one more token."""
        known = self._known.get(one.sequence)
        new = one.tokens[known.cached if known else 0 :]
        return (
            len(one.tokens) < self._draft.longest and max(new, default=0) < self._draft.vocabulary
        )

    def _drop_wrong_guesses(self, requests: dict[int, GuessRequest]) -> None:
        """Keep the KV of right guesses and drop that of wrong ones.

        At least the last token is left to be fed.
        """
        dropped = [0] * len(self._sequences)
        for at, number in enumerate(self._sequences):
            if number in requests:
                one, tokens = self._known[number], requests[number].tokens
                right = common_prefix(one.guessed, tokens[one.cached :])
                kept = min(one.cached + right, len(tokens) - 1)
                dropped[at] = one.cached + len(one.guessed) - kept
                one.cached, one.guessed = kept, []
        self._cache.drop(dropped)

    def _catch_up(self, requests: dict[int, GuessRequest]) -> None:
        """Prefill a chunk of one sequence that is behind; those that have caught up join."""
        for number, request in requests.items():
            one = self._known.get(number)
            if one is None:
                self._known[number] = _DraftSequence(kv.new_row(self._head))
            elif one.row is None and len(request.tokens) - one.cached > NEAR:
                del self._known[number]
                one.row = self._take_out(number)
                self._known[number] = one  # the last in the queue of those behind
        behind = {
            number: one
            for number, one in self._known.items()
            if one.row is not None and number in requests
        }
        for number, one in behind.items():
            self._feed(one, requests[number].tokens)
            break
        ready: dict[int, kv.RowCache] = {}
        for number, one in behind.items():
            if one.row is not None and len(requests[number].tokens) - one.cached <= NEAR:
                ready[number], one.row = one.row, None
        if ready:
            self._join(ready)

    def _feed(self, one: _DraftSequence, tokens: Sequence[int]) -> None:
        chunk = tokens[one.cached : -1][: self._pace.tokens(running=True)]
        if chunk:
            started = time.perf_counter()
            self._head(mx.array([chunk]), cache=one.row)
            kv.evaluate(one.row or [])
            self._pace.measured(len(chunk), time.perf_counter() - started)
            one.cached += len(chunk)

    def _guess(self, requests: dict[int, GuessRequest]) -> dict[int, list[int]]:
        """The guesses for the sequences in the batch."""
        able = {number: requests[number] for number in self._sequences if number in requests}
        batch = [self._known[number] for number in self._sequences]
        most = {n: min(one.most, self._draft.longest - len(one.tokens)) for n, one in able.items()}
        first = [
            list(able[number].tokens[one.cached :]) if number in able else []
            for number, one in zip(self._sequences, batch, strict=True)
        ]

        def run(fed: Sequence[Sequence[int]]) -> mx.array:
            for one, own in zip(batch, fed, strict=True):
                if fed is first:
                    one.cached += len(own)
                else:
                    one.guessed += own
            return self._run(fed)

        return self._guess_in_turn(first, most, run)
