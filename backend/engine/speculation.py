"""Lets a drafter run ahead of the one row that decodes.

With several rows the forward pass is already used well, so guessing is parked until one is left.
A row with a grammar, with penalties or with log-probabilities takes plain steps: what is chosen
there depends on more than the count of tokens. So does a row with images: a drafter has not seen
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from backend.engine import kv
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.verify import Sample, verify_step
from backend.engine.penalties import Past
from backend.engine.sampling import BatchSampler

if TYPE_CHECKING:
    from backend.engine.executor import ExecutorSequence

_NOTHING = Past((), 0, 1)


class Speculation:
    """The drafter of one batch, and the row that it follows."""

    def __init__(self, drafting: Drafting, model: Any, vocabulary: int, end_ids: list[int]) -> None:
        self._most = drafting.most
        self._model = model
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._drafter = drafting.new_drafter()
        self._row: ExecutorSequence | None = None
        self._samplers: dict[int, BatchSampler] = {}

    def fits(self, rows: Sequence[ExecutorSequence]) -> bool:
        """Whether guessing may pay now: it is for one row alone."""
        if len(rows) != 1 or rows[0].media is not None:
            return False
        row = rows[0]
        length = len(row.history) + 1
        request = row.request
        if row.constraint or request.sampling.remembers or request.logprobs is not None:
            return False
        return self._most_for(row) > 0 and (self._row is not row or self._drafter.ready(length))

    def advance(
        self, row: ExecutorSequence, cache: kv.RowCache, token: int, step: int
    ) -> list[int]:
        """The tokens after `token`, 1 or more, or none where there was no guess.

        cache: the row's KV, of the tokens in its history. step: tokens generated up to and
        including `token`. The cache then has `token` and all that is returned but the last.
        """
        if self._row is not row:
            self.forget()
            self._row = row
        if token in self._end_ids and not row.request.ignore_eos:
            return []
        guesses = self._drafter.propose([*row.history, token], self._most_for(row))
        if not guesses:
            return []
        tokens = verify_step(
            self._model, cache, token, guesses, self._sample(row), step, self._closing(row)
        )
        self._drafter.told(len(guesses), len(tokens) - 1)
        return tokens

    def left(self, rows: Sequence[ExecutorSequence]) -> None:
        """ExecutorSequences have left the batch."""
        if any(row is self._row for row in rows):
            self.forget()

    def forget(self) -> None:
        self._row = None
        self._samplers.clear()
        self._drafter.forget()

    def _most_for(self, row: ExecutorSequence) -> int:
        """Guesses that fit: the token at hand and the choice after the last guess count as well."""
        wanted = row.request.n_draft or self._most
        return min(wanted, row.limit - row.delivered - 2)

    def _closing(self, row: ExecutorSequence) -> list[int]:
        return [] if row.request.ignore_eos else self._end_ids

    def _sample(self, row: ExecutorSequence) -> Sample:
        """The row's own sampler, at as many successive steps as there are logits."""

        def sample(logits: mx.array, fed: mx.array, steps: list[int]) -> mx.array:
            count = len(steps)
            if count not in self._samplers:
                self._samplers[count] = BatchSampler(
                    [row.request.sampling] * count,
                    [_NOTHING] * count,
                    self._vocabulary,
                    end_ids=self._end_ids,
                    closed=[row.request.end_opens_at] * count,
                )
            return self._samplers[count](logits, fed, steps)

        return sample
