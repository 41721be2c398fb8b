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

    vocabulary: width of its logits.
    main_vocabulary: width of the main model's logits; padding may make them differ.
    longest: the draft model's own context, in tokens.
    cost: of its KV per sequence.
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
    """A sequence in the draft model's KV.

    cached: number of its tokens in that KV.
    guessed: number of draft tokens after them.
    row: the sequence's own KV while it catches up; None once it is in the batch.
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
        return super().nbytes + sum(
            kv.nbytes(sequence.row or []) for sequence in self._known.values()
        )

    def forget(self, sequences: Collection[int]) -> None:
        super().forget(sequences)
        for sequence in sequences:
            self._known.pop(sequence, None)

    def propose(self, requests: Sequence[GuessRequest]) -> list[list[int] | None]:
        able = {request.sequence: request for request in requests if self._can_follow(request)}
        self.forget([request.sequence for request in requests if request.sequence not in able])
        self._drop_wrong_guesses(able)
        self._catch_up(able)
        found = self._guess(able)
        return [
            found.get(request.sequence) if request.sequence in able else [] for request in requests
        ]

    def _can_follow(self, request: GuessRequest) -> bool:
        """Return whether the draft model knows these token ids and has memory for another token."""
        known = self._known.get(request.sequence)
        new = request.tokens[known.cached if known else 0 :]
        return (
            len(request.tokens) < self._draft.longest
            and max(new, default=0) < self._draft.vocabulary
        )

    def _drop_wrong_guesses(self, requests: dict[int, GuessRequest]) -> None:
        """Truncate the KV to the right draft tokens.

        At least the last token is left to be fed.
        """
        dropped = [0] * len(self._sequences)
        for at, number in enumerate(self._sequences):
            if number in requests:
                sequence, tokens = self._known[number], requests[number].tokens
                right = common_prefix(sequence.guessed, tokens[sequence.cached :])
                kept = min(sequence.cached + right, len(tokens) - 1)
                dropped[at] = sequence.cached + len(sequence.guessed) - kept
                sequence.cached, sequence.guessed = kept, []
        self._cache.drop(dropped)

    def _catch_up(self, requests: dict[int, GuessRequest]) -> None:
        """Prefill a chunk of one sequence that is behind; those that have caught up join."""
        for number, request in requests.items():
            sequence = self._known.get(number)
            if sequence is None:
                self._known[number] = _DraftSequence(kv.new_row(self._head))
            elif sequence.row is None and len(request.tokens) - sequence.cached > NEAR:
                del self._known[number]
                sequence.row = self._take_out(number)
                self._known[number] = sequence  # the last in the queue of those behind
        behind = {
            number: sequence
            for number, sequence in self._known.items()
            if sequence.row is not None and number in requests
        }
        for number, sequence in behind.items():
            self._feed(sequence, requests[number].tokens)
            break
        ready: dict[int, kv.RowCache] = {}
        for number, sequence in behind.items():
            if sequence.row is not None and len(requests[number].tokens) - sequence.cached <= NEAR:
                ready[number], sequence.row = sequence.row, None
        if ready:
            self._join(ready)

    def _feed(self, sequence: _DraftSequence, tokens: Sequence[int]) -> None:
        chunk = tokens[sequence.cached : -1][: self._pace.tokens(running=True)]
        if chunk:
            started = time.perf_counter()
            self._head(mx.array([chunk]), cache=sequence.row)
            kv.evaluate(sequence.row or [])
            self._pace.measured(len(chunk), time.perf_counter() - started)
            sequence.cached += len(chunk)

    def _guess(self, requests: dict[int, GuessRequest]) -> dict[int, list[int]]:
        """Return the guesses for the sequences in the batch."""
        able = {number: requests[number] for number in self._sequences if number in requests}
        batch = [self._known[number] for number in self._sequences]
        most = {
            n: min(sequence.most, self._draft.longest - len(sequence.tokens))
            for n, sequence in able.items()
        }
        first = [
            list(able[number].tokens[sequence.cached :]) if number in able else []
            for number, sequence in zip(self._sequences, batch, strict=True)
        ]

        def run(fed: Sequence[Sequence[int]]) -> mx.array:
            for sequence, own in zip(batch, fed, strict=True):
                if fed is first:
                    sequence.cached += len(own)
                else:
                    sequence.guessed += own
            return self._run(fed)

        return self._guess_in_turn(first, most, run)
