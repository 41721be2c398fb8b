"""Guesses with a smaller model that reads the same tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from backend.engine import kv
from backend.engine.drafting.length import DraftLength
from backend.engine.drafting.verify import accepted_count, cut_back
from backend.engine.plan import CacheCost
from backend.engine.prefill import Pace
from common.options import shown

_log = logging.getLogger(__name__)

SURE = 0.5  # a guess with a smaller share of the draft model's own probability is not made


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A loaded draft model.

    vocabulary: width of its logits. main_vocabulary: of the model that it guesses for; padding
    may make them differ. longest: tokens that it may read, its own context. cost: of its one row.
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
        """Weights, and the KV of the one row that it follows, at its longest."""
        return self.weights_bytes + self.cost.of(self.longest)


class ModelDrafter:
    """A `Drafter` with a draft model, whose KV cache follows the row.

    Guesses are the draft model's best tokens. After a long prompt, or after a rest, the cache is
    behind; each call then feeds one chunk, as long as `pace` gives, and proposes nothing until it
    has caught up. A fault of the draft model ends guessing for the row, and nothing else.
    """

    def __init__(self, draft: DraftModel, pace: Pace, sure: float = SURE) -> None:
        self._draft = draft
        self._pace = pace
        self._sure = sure
        self.forget()

    def forget(self) -> None:
        self._cache = kv.new_row(self._draft.model)
        self._held = 0  # tokens of the row in the cache
        self._guessed: list[int] = []  # guesses in the cache after those
        self._length = DraftLength()
        self._at = 0
        self._lost = False

    def ready(self, length: int) -> bool:
        return not self._lost and length < self._draft.longest and self._length.ready(length)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        self._at = len(tokens)
        count = self._length.allowed(self._at, min(most, self._draft.longest - self._at))
        if self._lost or count < 1:
            return []
        try:
            self._agree(tokens)
            missing = tokens[self._held : self._held + self._pace.tokens(running=True)]
            if max(missing) >= self._draft.vocabulary:
                self._give_up()
            elif self._held + len(missing) < len(tokens):
                self._catch_up(missing)
            elif guesses := self._guess(missing, count):
                return guesses
            else:
                self._length.nothing(self._at)
        except Exception:
            _log.warning("draft model %s failed", shown(self._draft.name), exc_info=True)
            self._give_up()
        return []

    def told(self, proposed: int, accepted: int) -> None:
        self._length.told(self._at, proposed, accepted)

    def _agree(self, tokens: Sequence[int]) -> None:
        """Keep the guesses that became tokens; at least the last token is left to be fed."""
        right = accepted_count(self._guessed, tokens[self._held :])
        keep = min(self._held + right, len(tokens) - 1)
        cut_back(self._cache, self._held + len(self._guessed) - keep)
        self._held, self._guessed = keep, []

    def _catch_up(self, missing: Sequence[int]) -> None:
        started = time.perf_counter()
        self._draft.model(mx.array([missing]), cache=self._cache)
        kv.evaluate(self._cache)
        self._pace.measured(len(missing), time.perf_counter() - started)
        self._held += len(missing)

    def _guess(self, missing: Sequence[int], count: int) -> list[int]:
        """The best tokens after the row, up to the first that the draft model is not sure of."""
        guesses: list[int] = []
        fed = missing
        self._held += len(missing)
        while True:
            logits = self._draft.model(mx.array([fed]), cache=self._cache)[0, -1]
            guess, share = _best(logits[: self._draft.main_vocabulary])
            if share < self._sure:
                return guesses
            guesses.append(guess)
            if len(guesses) == count:
                return guesses
            fed = [guess]
            self._guessed.append(guess)

    def _give_up(self) -> None:
        self.forget()
        self._lost = True


def _best(logits: mx.array) -> tuple[int, float]:
    """The best token of [vocabulary] logits, and its probability."""
    logits = logits.astype(mx.float32)
    best = mx.argmax(logits)
    share = mx.exp(logits[best] - mx.logsumexp(logits))
    mx.eval(best, share)
    return cast(int, best.item()), cast(float, share.item())
