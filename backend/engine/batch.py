"""Sequences that decode together: each takes one decode step in the same forward pass.

Steps overlap: `launch` starts the next forward pass on tokens that are still being computed, and
only then does `read` wait for those, so the device works while Python delivers text. A grammar has
to see a token before it can say what may follow, so with constrained sequences `launch` reads the
tokens, and fills the masks, while its forward pass runs; only choosing the next tokens waits for
that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np

from backend.engine import kv
from backend.engine.constraints.constraint import words
from backend.engine.drafting.speculation import Speculation
from backend.engine.events import TokenLogprob
from backend.engine.logprobs import BatchLogprobs, SampledLogprobs
from backend.engine.model import EngineModel
from backend.engine.penalties import Past
from backend.engine.sampling import BatchSampler

if TYPE_CHECKING:
    from backend.engine.executor import ExecutorSequence


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that was sampled for a sequence, and the fault that ends it, if there is one."""

    sequence: ExecutorSequence
    token: int
    logprob: TokenLogprob | None = None
    fault: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Choosers:
    """What chooses tokens for a fixed set of sequences; `constrained`: the places of those."""

    sampler: BatchSampler
    logprobs: BatchLogprobs
    constrained: tuple[int, ...]


@dataclass(slots=True)
class _Fed:
    """The tokens of a launched step and what is known of them.

    deliver: per sequence, whether its token is new; a prompt's last token is not.
    """

    tokens: mx.array
    deliver: list[bool]
    logprobs: tuple[BatchLogprobs, SampledLogprobs, list[ExecutorSequence]] | None
    faults: dict[int, Exception]
    ran: bool


class DecodeBatch:
    """The sequences of one rectangle of KV."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model.model
        self._vocabulary = model.vocabulary
        self._end_ids = sorted(model.end_tokens)
        self.sequences: list[ExecutorSequence] = []
        self._cache: kv.BatchCache | None = None
        self._tokens: mx.array | None = None
        self._choosers: _Choosers | None = None
        self._pending: tuple[BatchLogprobs, SampledLogprobs, list[ExecutorSequence]] | None = None
        self._fed: _Fed | None = None
        self._speculation: Speculation | None = None
        if model.drafting is not None:
            self._speculation = Speculation(
                model.drafting, self._model, self._vocabulary, self._end_ids
            )

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes if self._cache is not None else 0

    def join(self, joining: Sequence[ExecutorSequence]) -> None:
        """Add sequences whose own caches hold all of their tokens but the last.

        Raises what MLX raises; the batch is then as it was.
        """
        rows = [one.cache for one in joining if one.cache is not None]
        tokens = mx.array([one.tokens[-1] for one in joining], dtype=mx.uint32)
        if self._cache is None:
            self._cache = kv.BatchCache(rows)
        else:
            assert self._tokens is not None
            tokens = mx.concatenate([self._tokens, tokens])
            self._cache.join(rows)
        self._tokens = tokens
        self.sequences += joining
        self._choosers = None

    def launch(self) -> None:
        """Start the next forward pass, on the tokens that `read` then returns.

        A batch of one may guess ahead instead, which waits for its tokens: `read` does that.
        """
        self._fed = None
        if self._speculation is None or not self._speculation.fits(self.sequences):
            self._launch()

    def read(self) -> list[Sampled]:
        """The tokens that the launched step was fed, for every sequence for which they are new."""
        if self._fed is None:
            if (ahead := self._run_ahead()) is not None:
                return ahead
            self._launch()
        assert self._fed is not None
        fed, self._fed = self._fed, None
        tokens = _ids(fed.tokens)
        if fed.ran:
            for one, token in zip(self.sequences, tokens, strict=True):
                one.history.append(token)
        return self._delivered(fed, tokens)

    def give_up(self, one: ExecutorSequence) -> list[Sampled]:
        """Take a sequence out before its latest token was read; returns that token, if it is new.

        Its grammar sees the token now, because the sequence is fed it again without delivery.
        """
        at = self.sequences.index(one)
        sampled: list[Sampled] = []
        if not one.fresh:
            assert self._tokens is not None
            tokens = _ids(self._tokens)
            fault: Exception | None = None
            if one.constraint is not None and not one.constraint.ended:
                try:
                    one.constraint.accept(tokens[at])
                except Exception as refusal:
                    fault = refusal
            told = {} if self._pending is None else self._logprobs(self._pending, tokens)
            one.delivered += 1
            sampled = [Sampled(one, tokens[at], told.get(id(one)), fault)]
        self.leave([one])
        return sampled

    def extract(self, one: ExecutorSequence) -> kv.RowCache:
        """A copy of the KV of a sequence; `history` has its tokens."""
        assert self._cache is not None
        return self._cache.extract(self.sequences.index(one))

    def take(self, one: ExecutorSequence) -> kv.RowCache:
        """The KV of a sequence that is about to leave: the cache itself where it is alone."""
        assert self._cache is not None
        return self._cache.layers if len(self.sequences) == 1 else self.extract(one)

    def leave(self, leaving: Sequence[ExecutorSequence]) -> None:
        """Drop sequences; a token of theirs that was not read is dropped too."""
        gone = set(map(id, leaving))
        places = [at for at, one in enumerate(self.sequences) if id(one) in gone]
        stay = [at for at, one in enumerate(self.sequences) if id(one) not in gone]
        self._choosers = None
        if self._speculation is not None:
            self._speculation.left(leaving)
        if not stay:
            self.sequences, self._cache, self._tokens, self._pending = [], None, None, None
            return
        assert self._tokens is not None
        assert self._cache is not None
        self._cache.leave(places)
        self._tokens = self._tokens[mx.array(stay)]
        self.sequences = [self.sequences[at] for at in stay]

    def _launch(self) -> None:
        assert self._tokens is not None
        assert self._cache is not None
        fed = self._tokens
        deliver = [not one.fresh for one in self.sequences]
        choosers = self._choosers or self._choose_choosers()
        step = _Fed(fed, deliver, self._pending, {}, ran=not self._last_for_all())
        self._fed = step
        if not step.ran:
            return
        steps = [one.delivered + new for one, new in zip(self.sequences, deliver, strict=True)]
        for one in self.sequences:
            one.fresh = False
        logits = self._model(fed[:, None], cache=self._cache.layers)[:, -1, :]
        allowed: np.ndarray | None = None
        if choosers.constrained:
            mx.async_eval(logits)
            allowed = self._advance(choosers.constrained, step)
        self._tokens = choosers.sampler(logits, fed, steps, allowed)
        self._pending = None
        if not choosers.logprobs:
            mx.async_eval(self._tokens)
            return
        told = choosers.logprobs(logits, self._tokens)
        self._pending = (choosers.logprobs, told, list(self.sequences))
        mx.async_eval(self._tokens, told.arrays)

    def _advance(self, constrained: Sequence[int], step: _Fed) -> np.ndarray:
        """Let the grammars see their latest tokens, and fill the masks of what may follow.

        A grammar that fails, or has ended, leaves its sequence unmasked: it is about to go.
        """
        tokens = _ids(step.tokens)
        allowed = np.full((len(constrained), words(self._vocabulary)), 0xFFFFFFFF, dtype=np.uint32)
        for mask, at in zip(allowed, constrained, strict=True):
            constraint = self.sequences[at].constraint
            assert constraint is not None
            try:
                if step.deliver[at] and not constraint.ended:
                    constraint.accept(tokens[at])
                if not constraint.ended:
                    constraint.fill(mask)
            except Exception as fault:
                step.faults[at] = fault
                mask[:] = 0xFFFFFFFF
        return allowed

    def _delivered(self, fed: _Fed, tokens: Sequence[int]) -> list[Sampled]:
        told = {} if fed.logprobs is None else self._logprobs(fed.logprobs, tokens)
        sampled: list[Sampled] = []
        for at, (one, token) in enumerate(zip(self.sequences, tokens, strict=True)):
            if fed.deliver[at]:
                one.delivered += 1
                sampled.append(Sampled(one, token, told.get(id(one)), fed.faults.get(at)))
        return sampled

    def _run_ahead(self) -> list[Sampled] | None:
        """A step with guesses for the one sequence; None, and no step, where there are none."""
        assert self._speculation is not None
        assert self._tokens is not None
        assert self._cache is not None
        (one,) = self.sequences
        (token,) = _ids(self._tokens)
        new = not one.fresh
        tokens = self._speculation.advance(one, self._cache.layers, token, one.delivered + new)
        if not tokens:
            return None
        fed = [token, *tokens[:-1]]
        one.history += fed
        one.fresh = False
        self._tokens = mx.array(tokens[-1:], dtype=mx.uint32)
        delivered = fed if new else fed[1:]
        one.delivered += len(delivered)
        return [Sampled(one, each) for each in delivered]

    def _logprobs(
        self,
        pending: tuple[BatchLogprobs, SampledLogprobs, list[ExecutorSequence]],
        tokens: Sequence[int],
    ) -> dict[int, TokenLogprob]:
        """Log-probabilities of the tokens, by identity: sequences came and went since."""
        logprobs, told, sampled_for = pending
        fed = {id(one): token for one, token in zip(self.sequences, tokens, strict=True)}
        chosen = [fed.get(id(one), 0) for one in sampled_for]
        read = logprobs.read(told, chosen)
        return {id(sampled_for[at]): entry for at, entry in read.items()}

    def _last_for_all(self) -> bool:
        """Whether every sequence ends with the token at hand: no forward pass is needed."""
        return all(not one.fresh and one.delivered + 1 >= one.limit for one in self.sequences)

    def _choose_choosers(self) -> _Choosers:
        requests = [one.request for one in self.sequences]
        constrained = [at for at, one in enumerate(self.sequences) if one.constraint is not None]
        self._choosers = _Choosers(
            BatchSampler(
                [request.sampling for request in requests],
                [Past(one.history, len(one.prompt), one.longest) for one in self.sequences],
                self._vocabulary,
                end_ids=self._end_ids,
                closed=[request.end_opens_at for request in requests],
                constrained=constrained,
            ),
            BatchLogprobs([request.logprobs for request in requests]),
            tuple(constrained),
        )
        return self._choosers


def _ids(tokens: mx.array) -> list[int]:
    return cast(list[int], tokens.tolist())
