"""Sequences that decode together: each takes one decode step in the same forward pass.

Steps overlap: `launch` starts the next forward pass on tokens that are still being computed, and
only then does `read` wait for those, so the device works while Python delivers text. A grammar has
to see a token before it can say what may follow, so with constrained sequences `launch` reads the
tokens, and fills the masks, while its forward pass runs; only choosing the next tokens waits for
that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np

from backend.engine import kv
from backend.engine.constraints.constraint import words
from backend.engine.drafting.speculation import Speculation
from backend.engine.errors import NotFinite
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
class _Logprobs:
    """What is being computed of some sequences' log-probabilities."""

    batch: BatchLogprobs
    sampled: SampledLogprobs
    sequences: Sequence[ExecutorSequence]


@dataclass(slots=True)
class Chosen:
    """The next token of each sequence, being computed: [sequences] uint32.

    faults: those of grammars, by the sequence's identity. peaks: for some sequences, a number of
    each that is finite if its logits are.
    """

    sequences: Sequence[ExecutorSequence]
    tokens: mx.array
    logprobs: list[_Logprobs]
    faults: dict[int, Exception]
    peaks: list[tuple[mx.array, Sequence[ExecutorSequence]]] = field(default_factory=list)

    @property
    def arrays(self) -> list[mx.array]:
        logprobs = (array for one in self.logprobs for array in one.sampled.arrays)
        return [self.tokens, *logprobs, *(peaks for peaks, _ in self.peaks)]

    def of(self, one: ExecutorSequence) -> mx.array:
        """The token of one sequence, [1]."""
        at = next(at for at, other in enumerate(self.sequences) if other is one)
        return self.tokens[at : at + 1]


class Chooser:
    """What chooses tokens for a fixed set of sequences. pasts: their tokens before the fed ones."""

    def __init__(
        self, sequences: Sequence[ExecutorSequence], pasts: Sequence[Past], model: EngineModel
    ) -> None:
        requests = [one.request for one in sequences]
        self._sequences = list(sequences)
        self._vocabulary = model.vocabulary
        self._spread = model.spread
        self._constrained = [at for at, one in enumerate(sequences) if one.constraint is not None]
        self._sampler = BatchSampler(
            [request.sampling for request in requests],
            pasts,
            model.vocabulary,
            end_ids=sorted(model.end_tokens),
            closed=[request.end_opens_at for request in requests],
            constrained=self._constrained,
        )
        self._logprobs = BatchLogprobs([request.logprobs for request in requests])

    @property
    def nbytes(self) -> int:
        """Bytes that are kept from step to step."""
        return self._sampler.nbytes

    def __call__(
        self,
        logits: mx.array,
        fed: mx.array,
        steps: Sequence[int],
        faults: dict[int, Exception],
        *,
        new: bool,
    ) -> Chosen:
        """logits: [sequences, vocabulary]. fed: [sequences], the tokens that led to them.

        steps: tokens generated, per sequence. faults: takes those of the grammars. new: whether
        the grammars have yet to see `fed`, which is read for them while the logits are computed.
        """
        allowed: np.ndarray | None = None
        if self._constrained:
            mx.async_eval(logits)
            allowed = self._advance(ids(fed) if new else None, faults)
        tokens = self._sampler(logits, fed, steps, allowed)
        if self._spread is not None:
            tokens = self._spread(tokens)
        logprobs = []
        if self._logprobs:
            sampled = self._logprobs(logits, tokens)
            logprobs.append(_Logprobs(self._logprobs, sampled, self._sequences))
        peaks = self._sampler.peaks(logits, tokens)
        chosen = Chosen(self._sequences, tokens, logprobs, {}, [(peaks, self._sequences)])
        mx.async_eval(chosen.arrays)
        return chosen

    def _advance(
        self, tokens: Sequence[int] | None, faults: dict[int, Exception]
    ) -> np.ndarray | None:
        """Let the grammars see their latest tokens, and fill the masks of what may follow.

        A grammar that fails, or has ended, leaves its sequence unmasked: it is about to go. None
        where every token may follow in every sequence, as within a thinking budget.
        """
        shape = (len(self._constrained), words(self._vocabulary))
        allowed = np.full(shape, 0xFFFFFFFF, dtype=np.uint32)
        for mask, at in zip(allowed, self._constrained, strict=True):
            one = self._sequences[at]
            assert one.constraint is not None
            try:
                if tokens is not None and not (one.first_delivered or one.constraint.ended):
                    one.constraint.accept(tokens[at])
                if not one.constraint.ended:
                    one.constraint.fill(mask)
            except Exception as fault:
                faults[id(one)] = fault
                mask[:] = 0xFFFFFFFF
        return allowed if (allowed != 0xFFFFFFFF).any() else None


def first_tokens(
    sequences: Sequence[ExecutorSequence], logits: mx.array, model: EngineModel
) -> Chosen:
    """What follows the tokens that were prefilled. logits: [sequences, vocabulary]."""
    pasts = [Past(one.history[:-1], len(one.prompt), one.longest) for one in sequences]
    fed = mx.array([one.history[-1] for one in sequences], dtype=mx.uint32)
    steps = [one.delivered for one in sequences]
    faults: dict[int, Exception] = {}
    chosen = Chooser(sequences, pasts, model)(logits, fed, steps, faults, new=False)
    chosen.faults = faults
    return chosen


@dataclass(frozen=True, slots=True)
class _Fed:
    """The tokens of a launched step. ran: whether there is a forward pass on them."""

    chosen: Chosen
    ran: bool


@dataclass(eq=False, slots=True)
class PrefillGroup:
    """Sequences that are prefilled together, in the order of their KV."""

    cache: kv.BatchCache
    sequences: list[ExecutorSequence]

    @classmethod
    def gathered(cls, sequences: Sequence[ExecutorSequence]) -> PrefillGroup:
        """The group of just these sequences, which leave the groups that they are in.

        Raises what MLX raises; the groups are then as they were.
        """
        groups = [one.group for one in sequences if one.group is not None]
        if len(groups[0].sequences) == len(sequences) == groups.count(groups[0]):
            return groups[0]
        gathered = cls(kv.BatchCache(), list(sequences))
        members = [
            group.cache.member(group.sequences.index(one))
            for one, group in zip(sequences, groups, strict=True)
        ]
        if len(sequences) == 1:
            members = [(groups[0].extract(sequences[0]), 0)]
        gathered.cache.join(members)
        for one, group in zip(sequences, groups, strict=True):
            group.drop(one)
            one.group = gathered
        return gathered

    def alone(self, one: ExecutorSequence) -> kv.RowCache:
        """The KV of a sequence, which from now on is a group of its own."""
        return PrefillGroup.gathered([one]).cache.layers

    def extract(self, one: ExecutorSequence) -> kv.RowCache:
        """A copy of the KV of a sequence that owns its buffers."""
        return self.cache.extract(self.sequences.index(one))

    def settle(self) -> None:
        """Copy those who stay, if somebody has left, so that the larger rectangle can go."""
        if not self.cache.settled:
            mx.async_eval([layer.state for layer in self.cache.layers])

    def drop(self, one: ExecutorSequence) -> None:
        self.cache.leave([self.sequences.index(one)])
        self.sequences.remove(one)


class DecodeBatch:
    """The sequences of one rectangle of KV, whose tokens at hand wait to be fed."""

    def __init__(self, model: EngineModel) -> None:
        self._engine_model = model
        self._model = model.model
        self.sequences: list[ExecutorSequence] = []
        self._cache = kv.BatchCache()
        self._chosen: Chosen | None = None
        self._chooser: Chooser | None = None
        self._fed: _Fed | None = None
        self._speculation: Speculation | None = None
        if model.drafting is not None:
            self._speculation = Speculation(
                model.drafting, self._model, model.vocabulary, sorted(model.end_tokens)
            )

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    @property
    def draft_bytes(self) -> int:
        """Bytes of the KV of a draft model."""
        return self._speculation.nbytes if self._speculation is not None else 0

    @property
    def chooser_bytes(self) -> int:
        """Bytes of what is kept from step to step to change logits: biases, counts of tokens."""
        return self._chooser.nbytes if self._chooser is not None else 0

    def join(self, group: PrefillGroup, joining: Sequence[ExecutorSequence]) -> None:
        """Add sequences of a group, whose first tokens are chosen. They leave the group.

        Raises what MLX raises; the batch is then as it was.
        """
        first = [one.first for one in joining if one.first is not None]
        tokens = [chosen.of(one) for chosen, one in zip(first, joining, strict=True)]
        if self._chosen is not None:
            tokens.insert(0, self._chosen.tokens)
        joined = mx.concatenate(tokens)
        self._cache.absorb(group.cache, [group.sequences.index(one) for one in joining])
        group.sequences = [one for one in group.sequences if one not in joining]
        known = [] if self._chosen is None else [self._chosen]
        known += {id(chosen): chosen for chosen in first}.values()
        self.sequences = [*self.sequences, *joining]
        self._chosen = Chosen(
            self.sequences,
            joined,
            [one for chosen in known for one in chosen.logprobs],
            {at: fault for chosen in known for at, fault in chosen.faults.items()},
            [peaks for chosen in known for peaks in chosen.peaks],
        )
        self._chooser = None
        for one in joining:
            one.batch, one.group, one.first, one.media_prefill = self, None, None, None

    def launch(self) -> None:
        """Start the next forward pass, on the tokens that `read` then returns.

        A batch of one may guess ahead instead, which waits for its tokens: `read` does that.
        """
        self._fed = None
        if self._speculation is None or not self._speculation.fits(self.sequences):
            self._launch()

    def read(self) -> list[Sampled]:
        """The tokens that the launched step was fed."""
        if self._fed is None:
            if (ahead := self._run_ahead()) is not None:
                return ahead
            self._launch()
        assert self._fed is not None
        fed, self._fed = self._fed, None
        tokens = ids(fed.chosen.tokens)
        if fed.ran:
            for one, token in zip(self.sequences, tokens, strict=True):
                one.history.append(token)
        return _delivered(sampled_of(self.sequences, fed.chosen, tokens))

    def give_up(self, one: ExecutorSequence) -> list[Sampled]:
        """Take a sequence out before its latest token was read; returns that token.

        Its grammar sees the token now, because it is prefilled with the others of the sequence.
        """
        assert self._chosen is not None
        tokens = ids(self._chosen.tokens)
        at = self.sequences.index(one)
        if not one.first_delivered:
            accept(one, tokens[at], self._chosen.faults)
        sampled = sampled_of(self.sequences, self._chosen, tokens)[at]
        self.leave([one])
        return _delivered([sampled])

    def extract(self, one: ExecutorSequence) -> kv.RowCache:
        """A copy of the KV of a sequence; `history` has its tokens."""
        return self._cache.extract(self.sequences.index(one))

    def take(self, one: ExecutorSequence) -> kv.RowCache:
        """The KV of a sequence that is about to leave: the cache itself where it is alone."""
        return self._cache.layers if len(self.sequences) == 1 else self.extract(one)

    def leave(self, leaving: Sequence[ExecutorSequence]) -> None:
        """Drop sequences; a token of theirs that was not read is dropped too."""
        gone = set(map(id, leaving))
        places = [at for at, one in enumerate(self.sequences) if id(one) in gone]
        stay = [at for at, one in enumerate(self.sequences) if id(one) not in gone]
        self._chooser = None
        if self._speculation is not None:
            self._speculation.left(leaving)
        self.sequences = [self.sequences[at] for at in stay]
        self._cache.leave(places)
        if not stay:
            self._chosen = None
            return
        assert self._chosen is not None
        self._chosen.tokens = self._chosen.tokens[mx.array(stay)]
        self._chosen.sequences = self.sequences

    def _launch(self) -> None:
        assert self._chosen is not None
        chosen = self._chosen
        step = self._fed = _Fed(chosen, ran=not self._last_for_all())
        if not step.ran:
            return
        if self._chooser is None:
            pasts = [Past(one.history, len(one.prompt), one.longest) for one in self.sequences]
            self._chooser = Chooser(self.sequences, pasts, self._engine_model)
        logits = self._model(chosen.tokens[:, None], cache=self._cache.layers)[:, -1, :]
        steps = [one.delivered + 1 for one in self.sequences]
        self._chosen = self._chooser(logits, chosen.tokens, steps, chosen.faults, new=True)

    def _run_ahead(self) -> list[Sampled] | None:
        """A step with guesses for the one sequence; None, and no step, where there are none."""
        assert self._speculation is not None
        assert self._chosen is not None
        (one,) = self.sequences
        (token,) = ids(self._chosen.tokens)
        tokens = self._speculation.advance(one, self._cache.layers, token, one.delivered + 1)
        if not tokens:
            return None
        fed = [token, *tokens[:-1]]
        one.history += fed
        latest = mx.array(tokens[-1:], dtype=mx.uint32)
        self._chosen = Chosen(self.sequences, latest, [], {})
        return _delivered([Sampled(one, each) for each in fed])

    def _last_for_all(self) -> bool:
        """Whether every sequence ends with the token at hand: no forward pass is needed."""
        return all(one.delivered + 1 >= one.limit for one in self.sequences)


def accept(one: ExecutorSequence, token: int, faults: dict[int, Exception]) -> None:
    """Let the grammar of a sequence see a token, if it has one; faults: takes what that raises."""
    if one.constraint is not None and not one.constraint.ended:
        try:
            one.constraint.accept(token)
        except Exception as refusal:
            faults[id(one)] = refusal


def _delivered(sampled: Sequence[Sampled]) -> list[Sampled]:
    """Count the tokens; those of them that nobody has yet."""
    new: list[Sampled] = []
    for one in sampled:
        one.sequence.delivered += 1
        if not one.sequence.first_delivered:
            new.append(one)
        one.sequence.first_delivered = False
    return new


def sampled_of(
    sequences: Sequence[ExecutorSequence], chosen: Chosen, tokens: Sequence[int]
) -> list[Sampled]:
    """The tokens with all that is known of them."""
    by_sequence = {id(one): token for one, token in zip(sequences, tokens, strict=True)}
    logprobs: dict[int, TokenLogprob] = {}
    for part in chosen.logprobs:
        # Some of them may have left since.
        own = [by_sequence.get(id(one), 0) for one in part.sequences]
        for at, entry in part.batch.read(part.sampled, own).items():
            logprobs[id(part.sequences[at])] = entry
    faults = dict(chosen.faults)
    for peaks, rows in chosen.peaks:
        for one, peak in zip(rows, cast(list[float], peaks.tolist()), strict=True):
            if not math.isfinite(peak):
                faults[id(one)] = NotFinite()
    return [
        Sampled(one, token, logprobs.get(id(one)), faults.get(id(one)))
        for one, token in zip(sequences, tokens, strict=True)
    ]


def ids(tokens: mx.array) -> list[int]:
    return cast(list[int], tokens.tolist())
