"""A smaller model that reads the same tokens, and guesses the next ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from backend.engine import kv
from backend.engine.drafting.drafter import DraftLength
from backend.engine.drafting.verify import cut_back
from backend.engine.plan import CacheCost
from backend.engine.prefill import Pace
from common.prefixes import common_prefix
from common.wording import shown

_log = logging.getLogger(__name__)

LEAST_PROBABILITY = 0.5  # by the draft model's own measure, of a guess that is made


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A loaded draft model.

    vocabulary: width of its logits. main_vocabulary: of the model that it guesses for; padding
    may make them differ. longest: tokens that it may read, its own context. cost: of the KV of
    the one sequence that it follows.
    """

    name: str
    model: Any
    vocabulary: int
    main_vocabulary: int
    longest: int
    weights_bytes: int
    cost: CacheCost

    @property
    def nbytes(self) -> int:
        """Weights, and the KV of one sequence at its longest."""
        return self.weights_bytes + self.cost.of(self.longest)


class ModelDrafter:
    """A `Drafter` with a draft model, whose KV cache follows the sequence.

    Guesses are the draft model's best tokens. After a long prompt, or after a rest, the cache is
    behind; each call then feeds one chunk, as long as `pace` gives, and proposes nothing until it
    has caught up. A fault of the draft model ends guessing for the sequence, and nothing else.
    """

    def __init__(
        self, draft: DraftModel, pace: Pace, least_probability: float = LEAST_PROBABILITY
    ) -> None:
        self._draft = draft
        self._pace = pace
        self._least_probability = least_probability
        self._cache = kv.new_row(draft.model)
        self._cached = 0  # tokens of the sequence in the cache
        self._guessed: list[int] = []  # guesses in the cache after those
        self._length = DraftLength()
        self._given_up = False

    def ready(self, length: int) -> bool:
        return not self._given_up and length < self._draft.longest and self._length.ready(length)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        length = len(tokens)
        count = self._length.begin(length, min(most, self._draft.longest - length))
        if self._given_up or count < 1:
            return []
        try:
            self._agree(tokens)
            missing = tokens[self._cached : self._cached + self._pace.tokens(running=True)]
            if max(missing) >= self._draft.vocabulary:
                self._give_up()
            elif self._cached + len(missing) < length:
                self._catch_up(missing)
            elif guesses := self._guess(missing, count):
                return guesses
            else:
                self._length.record_none()
        except Exception:
            _log.warning("draft model %s failed", shown(self._draft.name), exc_info=True)
            self._give_up()
        return []

    def record(self, proposed: int, accepted: int) -> None:
        self._length.record(proposed, accepted)

    @property
    def nbytes(self) -> int:
        return kv.nbytes(self._cache)

    def _agree(self, tokens: Sequence[int]) -> None:
        """Keep the guesses that became tokens; at least the last token is left to be fed."""
        right = common_prefix(self._guessed, tokens[self._cached :])
        keep = min(self._cached + right, len(tokens) - 1)
        cut_back(self._cache, self._cached + len(self._guessed) - keep)
        self._cached, self._guessed = keep, []

    def _catch_up(self, missing: Sequence[int]) -> None:
        started = time.perf_counter()
        self._draft.model(mx.array([missing]), cache=self._cache)
        kv.evaluate(self._cache)
        self._pace.measured(len(missing), time.perf_counter() - started)
        self._cached += len(missing)

    def _guess(self, missing: Sequence[int], count: int) -> list[int]:
        """The best tokens after the sequence, up to the first that is not probable enough."""
        guesses: list[int] = []
        fed = missing
        self._cached += len(missing)
        while True:
            logits = self._draft.model(mx.array([fed]), cache=self._cache)[0, -1]
            guess, probability = _best(logits[: self._draft.main_vocabulary])
            if probability < self._least_probability:
                return guesses
            guesses.append(guess)
            if len(guesses) == count:
                return guesses
            fed = [guess]
            self._guessed.append(guess)

    def _give_up(self) -> None:
        self._cache, self._given_up = [], True


def _best(logits: mx.array) -> tuple[int, float]:
    """The best token of [vocabulary] logits, and its probability."""
    logits = logits.astype(mx.float32)
    best = mx.argmax(logits)
    probability = mx.exp(logits[best] - mx.logsumexp(logits))
    mx.eval(best, probability)
    return cast(int, best.item()), cast(float, probability.item())
