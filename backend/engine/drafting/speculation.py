"""Lets a drafter run ahead of a sequence that decodes alone.

With several sequences the forward pass is already used well, so guessing stops until one is left.
A sequence with a grammar, with penalties or with log-probabilities takes plain steps: what is
chosen there depends on more than the count of tokens. So does one with images: a drafter has not
seen them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from backend.engine import kv
from backend.engine.drafting.verify import Sample, verify_step
from backend.engine.penalties import Past
from backend.engine.sampling import BatchSampler

if TYPE_CHECKING:
    from backend.engine.drafting.draft_loading import Drafting
    from backend.engine.drafting.drafter import Drafter
    from backend.engine.executor import ExecutorSequence
    from backend.engine.request import GenerationRequest

_NOTHING = Past((), 0, 1)


class Speculation:
    """The drafter of the one sequence that a batch has."""

    def __init__(self, drafting: Drafting, model: Any, vocabulary: int, end_ids: list[int]) -> None:
        self._drafting = drafting
        self._model = model
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._drafter: Drafter | None = None
        self._sequence: ExecutorSequence | None = None
        self._samplers: dict[int, BatchSampler] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the drafter keeps from step to step."""
        return self._drafter.nbytes if self._drafter is not None else 0

    def fits(self, sequences: Sequence[ExecutorSequence]) -> bool:
        """Whether guessing may pay now: it is for one sequence alone."""
        if len(sequences) != 1 or sequences[0].media is not None:
            return False
        one = sequences[0]
        request = one.request
        if one.constraint or request.sampling.remembers or request.logprobs is not None:
            return False
        if self._most_for(one) <= 0:
            return False
        if self._drafter is None or self._sequence is not one:
            return True
        return self._drafter.ready(len(one.history) + 1)

    def advance(
        self, one: ExecutorSequence, cache: kv.RowCache, token: int, step: int
    ) -> list[int]:
        """The tokens after `token`, 1 or more, or none where there was no guess.

        cache: the sequence's KV, of the tokens in its history. step: tokens generated up to and
        including `token`. The cache then has `token` and all that is returned but the last.
        """
        if self._drafter is None or self._sequence is not one:
            self._sequence, self._drafter = one, self._drafting.new_drafter()
            self._samplers.clear()
        if token in self._end_ids and not one.request.ignore_eos:
            return []
        guesses = self._drafter.propose([*one.history, token], self._most_for(one))
        if not guesses:
            return []
        end_ids = [] if one.request.ignore_eos else self._end_ids
        tokens = verify_step(
            self._model, cache, token, guesses, self._sample(one.request), step, end_ids
        )
        self._drafter.record(len(guesses), len(tokens) - 1)
        return tokens

    def left(self, sequences: Sequence[ExecutorSequence]) -> None:
        """Sequences have left the batch."""
        if any(one is self._sequence for one in sequences):
            self._sequence = self._drafter = None
            self._samplers.clear()

    def _most_for(self, one: ExecutorSequence) -> int:
        """Guesses that fit: the token at hand and the choice after the last guess count as well."""
        wanted = one.request.n_draft or self._drafting.most
        return min(wanted, one.limit - one.delivered - 2)

    def _sample(self, request: GenerationRequest) -> Sample:
        """The sequence's own sampler, at as many successive steps as there are logits."""

        def sample(logits: mx.array, fed: mx.array, steps: list[int]) -> mx.array:
            count = len(steps)
            if count not in self._samplers:
                self._samplers[count] = BatchSampler(
                    [request.sampling] * count,
                    [_NOTHING] * count,
                    self._vocabulary,
                    end_ids=self._end_ids,
                    closed=[request.end_opens_at] * count,
                )
            return self._samplers[count](logits, fed, steps)

        return sample
