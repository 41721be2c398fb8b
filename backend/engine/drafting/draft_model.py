"""A smaller model that reads the same tokens and guesses the next ones."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.drafting.drafter import GuessRequest
from backend.engine.planning.pace import Pace
from backend.engine.planning.plan import CacheCost
from common.prefixes import common_prefix

# lowest probability, according to the draft model, at which a guess is made
LEAST_PROBABILITY = 0.5
_NEAR = 32  # tokens that a sequence may be behind and still be fed together with the others


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

    sequence: int
    row: kv.RowCache | None
    cached: int = 0
    guessed: list[int] = field(default_factory=list)


class ModelGuesser:
    """A `Guesser` with a draft model, which runs for all sequences of a batch together.

    Guesses are the draft model's best tokens, up to the first whose probability is too low. A
    sequence that is new, or had no guesses for a long time, first catches up alone: each call
    prefills a chunk of one such sequence, whose length `pace` sets, until it can join the others.
    """

    def __init__(
        self, draft: DraftModel, pace: Pace, least_probability: float = LEAST_PROBABILITY
    ) -> None:
        self._draft = draft
        self._pace = pace
        self._least_probability = least_probability
        self._cache = kv.BatchCache()
        self._batch: list[_DraftSequence] = []  # in the order of the batch's rows
        self._behind: dict[int, _DraftSequence] = {}

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes + sum(kv.nbytes(one.row or []) for one in self._behind.values())

    def forget(self, sequences: Collection[int]) -> None:
        self._leave([at for at, one in enumerate(self._batch) if one.sequence in sequences])
        for sequence in sequences:
            self._behind.pop(sequence, None)

    def propose(self, requests: Sequence[GuessRequest]) -> list[list[int] | None]:
        able = {one.sequence: one for one in requests if self._can_follow(one)}
        self.forget([one.sequence for one in requests if one.sequence not in able])
        self._drop_wrong_guesses(able)
        self._catch_up(able)
        found = self._guess(able)
        return [found.get(one.sequence) if one.sequence in able else [] for one in requests]

    def _can_follow(self, one: GuessRequest) -> bool:
        """Whether the draft model knows all these token ids and has room for one more token."""
        known = next((at for at in self._batch if at.sequence == one.sequence), None)
        known = known or self._behind.get(one.sequence)
        new = one.tokens[known.cached if known else 0 :]
        return (
            len(one.tokens) < self._draft.longest and max(new, default=0) < self._draft.vocabulary
        )

    def _drop_wrong_guesses(self, requests: dict[int, GuessRequest]) -> None:
        """Keep the KV of right guesses and drop that of wrong ones.

        At least the last token is left to be fed.
        """
        dropped = [0] * len(self._batch)
        for at, one in enumerate(self._batch):
            if one.sequence not in requests:
                continue
            tokens = requests[one.sequence].tokens
            right = common_prefix(one.guessed, tokens[one.cached :])
            kept = min(one.cached + right, len(tokens) - 1)
            dropped[at] = one.cached + len(one.guessed) - kept
            one.cached, one.guessed = kept, []
        self._cache.drop(dropped)

    def _catch_up(self, requests: dict[int, GuessRequest]) -> None:
        """Prefill a chunk of one sequence that is behind.

        Those that have caught up join the batch.
        """
        far = [
            at
            for at, one in enumerate(self._batch)
            if one.sequence in requests and len(requests[one.sequence].tokens) - one.cached > _NEAR
        ]
        for at in far:
            one = self._batch[at]
            one.row = self._cache.extract(at)
            self._behind[one.sequence] = one
        self._leave(far)
        followed = {one.sequence for one in self._batch} | self._behind.keys()
        for sequence in requests.keys() - followed:
            self._behind[sequence] = _DraftSequence(sequence, kv.new_row(self._draft.model))
        for one in self._behind.values():
            if one.sequence in requests:
                tokens = requests[one.sequence].tokens
                if one.cached < len(tokens) - 1:
                    self._feed(one, tokens)
                break
        ready = [
            one
            for one in self._behind.values()
            if one.sequence in requests and len(requests[one.sequence].tokens) - one.cached <= _NEAR
        ]
        if ready:
            self._cache.join([(one.row or [], 0) for one in ready])
            for one in ready:
                one.row = None
                self._batch.append(self._behind.pop(one.sequence))

    def _feed(self, one: _DraftSequence, tokens: Sequence[int]) -> None:
        chunk = tokens[one.cached : -1][: self._pace.tokens(running=True)]
        started = time.perf_counter()
        self._draft.model(mx.array([chunk]), cache=one.row)
        kv.evaluate(one.row or [])
        self._pace.measured(len(chunk), time.perf_counter() - started)
        one.cached += len(chunk)

    def _guess(self, requests: dict[int, GuessRequest]) -> dict[int, list[int]]:
        """The guesses for the sequences in the batch."""
        active = [one for one in self._batch if one.sequence in requests]
        if not active:
            return {}
        fed = [
            list(requests[one.sequence].tokens[one.cached :]) if one in active else []
            for one in self._batch
        ]
        most = {
            one.sequence: min(
                requests[one.sequence].most,
                self._draft.longest - len(requests[one.sequence].tokens),
            )
            for one in active
        }
        for one, tokens in zip(self._batch, fed, strict=True):
            one.cached += len(tokens)
        found: dict[int, list[int]] = {one.sequence: [] for one in active}
        while True:
            best = self._run(fed)
            fed = [[] for _ in self._batch]
            for at, one in enumerate(self._batch):
                if one not in active:
                    continue
                guess, probability = best[at]
                own = found[one.sequence]
                if probability >= self._least_probability:
                    own.append(guess)
                if probability < self._least_probability or len(own) >= most[one.sequence]:
                    active.remove(one)
                    continue
                fed[at] = [guess]
                one.guessed.append(guess)
            if not active:
                return found

    def _run(self, fed: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
        """Feed each sequence its tokens; returns the best token after them, and its probability."""
        width = max(map(len, fed))
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in fed]
        logits = self._draft.model(mx.array(padded), cache=self._cache.layers)
        last = mx.array([max(len(tokens) - 1, 0) for tokens in fed])[:, None, None]
        logits = mx.take_along_axis(logits, last, axis=1)[:, 0, : self._draft.main_vocabulary]
        logits = logits.astype(mx.float32)
        guesses = mx.argmax(logits, axis=-1)
        peaks = mx.max(logits, axis=-1)
        shares = mx.exp(peaks - mx.logsumexp(logits, axis=-1))
        mx.eval(guesses, shares)
        self._cache.drop([width - len(tokens) for tokens in fed])
        return list(
            zip(cast(list[int], guesses.tolist()), cast(list[float], shares.tolist()), strict=True)
        )

    def _leave(self, places: Sequence[int]) -> None:
        self._batch = [one for at, one in enumerate(self._batch) if at not in places]
        self._cache.leave(places)
