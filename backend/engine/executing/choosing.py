"""Samples the next tokens of several sequences from their logits, under grammar masks.

A grammar needs a token before it can compute the mask of the next token. The tokens are therefore
read, and the masks filled, while the logits are computed; only sampling waits for the masks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx
import numpy as np

from backend.engine.constraints.constraint import words
from backend.engine.errors import NotFinite
from backend.engine.events import TokenLogprob
from backend.engine.model import EngineModel
from backend.engine.sampling.logprobs import BatchLogprobs
from backend.engine.sampling.penalties import Past
from backend.engine.sampling.sampler import UNFIT, BatchSampler

if TYPE_CHECKING:
    from backend.engine.executing.executor_sequence import ExecutorSequence

_MOST_STALLS = 2  # maximum processor time of the grammars in one step, as a multiple of `stall_ms`


# A token that was sampled for a sequence: the sequence, the token, its log-probability if that was
# requested, the fault that ends the sequence, if any, and whether the sequence's grammar ends with
# the token. A tuple, because there is one for each token.
Sampled: TypeAlias = tuple["ExecutorSequence", int, TokenLogprob | None, Exception | None, bool]


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities of some sequences, still being computed."""

    batch: BatchLogprobs
    computed: mx.array
    sequences: Sequence[ExecutorSequence]


@dataclass(slots=True)
class Chosen:
    """The next token of each sequence, while the device computes it.

    tokens: [sequences] uint32, for the next pass.
    checked: the same tokens for the host, with UNFIT where logits are not finite.
    faults: errors of grammars and logits, by `id` of the sequence.
    known: the tokens, once they have been read.
    fed: whether a forward pass was launched on the tokens.
    again: tokens that this pass feeds each sequence once more, before its token; empty if none.
    """

    sequences: Sequence[ExecutorSequence]
    tokens: mx.array
    checked: mx.array
    logprobs: list[_Logprobs]
    faults: dict[int, Exception] = field(default_factory=dict)
    known: Sequence[int] | None = None
    fed: bool = False
    again: Sequence[Sequence[int]] = ()

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tokens, self.checked, *(logprobs.computed for logprobs in self.logprobs)]

    def read(self) -> Sequence[int]:
        """Wait for the tokens, and add sequences whose logits are not finite to `faults`."""
        if self.known is None:
            self.known, unfit = fitting(self.checked)
            for at in unfit:
                self.faults[id(self.sequences[at])] = NotFinite()
        return self.known

    def select(self, sequences: Sequence[ExecutorSequence]) -> Chosen:
        """Return the tokens of these sequences, in this order.

        The device starts now, because a later read would wait for a whole pass launched meanwhile.
        """
        index = {id(sequence): at for at, sequence in enumerate(self.sequences)}
        order = mx.array([index[id(sequence)] for sequence in sequences])
        tokens, checked = self.tokens[order], self.checked[order]
        mx.async_eval(tokens, checked)
        return Chosen(sequences, tokens, checked, self.logprobs, self.faults)


def combined(parts: Sequence[Chosen]) -> Chosen:
    """Return the tokens of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Chosen(
        [sequence for part in parts for sequence in part.sequences],
        mx.concatenate([part.tokens for part in parts]),
        mx.concatenate([part.checked for part in parts]),
        [logprobs for part in parts for logprobs in part.logprobs],
        {at: fault for part in parts for at, fault in part.faults.items()},
    )


class Chooser:
    """Samples tokens for a fixed set of sequences.

    pasts: the tokens of each sequence before a step.
    spent: seconds of processor time that grammars have already used in this step; None if no
        sequence without a grammar waits for them.
    """

    def __init__(
        self,
        sequences: Sequence[ExecutorSequence],
        pasts: Sequence[Past],
        model: EngineModel,
        *,
        spent: float | None = None,
    ) -> None:
        requests = [sequence.request for sequence in sequences]
        self._sequences = list(sequences)
        self._vocabulary = model.vocabulary
        self._broadcast = model.broadcast
        self._constrained = [
            at for at, sequence in enumerate(sequences) if sequence.constraint is not None
        ]
        self._spent = spent or 0.0
        self._most_seconds = most_grammar_seconds(sequences, model, delays=spent is not None)
        self._sampler = BatchSampler(
            [request.sampling for request in requests],
            pasts,
            model.vocabulary,
            end_ids=sorted(model.end_tokens),
            closed=[request.end_opens_at for request in requests],
            constrained=self._constrained,
        )
        counts = [request.logprobs for request in requests]
        self._logprobs = BatchLogprobs(counts) if any(n is not None for n in counts) else None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that later steps need."""
        return self._sampler.nbytes

    def __call__(self, logits: mx.array, fed: Chosen, *, new: bool) -> Chosen:
        """Sample the next tokens from logits, [sequences, vocabulary].

        fed: the tokens before; their `faults` collect the errors of grammars.
        new: whether `fed` was generated and not read yet; the grammars then read these tokens while
            the logits are computed.
        """
        allowed: np.ndarray | None = None
        if self._constrained:
            mx.async_eval(logits)
            allowed = self._advance(fed.read() if new else None, fed.faults)
        steps: Sequence[int] = ()
        if not self._sampler.plain:
            steps = [sequence.delivered + new for sequence in self._sequences]
        return self.choose(logits, fed.tokens, steps, allowed)

    def choose(
        self, logits: mx.array, fed: mx.array, steps: Sequence[int], allowed: np.ndarray | None
    ) -> Chosen:
        """Sample the next tokens under masks that are already filled.

        logits: [sequences, vocabulary].
        fed: the tokens before, [sequences].
        steps: number of tokens generated so far, per sequence.
        allowed: masks of the constrained sequences, [constrained, words].
        """
        tokens = self._sampler(logits, fed, steps, allowed)
        if self._broadcast is not None:
            tokens = self._broadcast(tokens)
        checked = self._sampler.checked(logits, tokens)
        if self._logprobs is None:
            mx.async_eval(tokens, checked)
            return Chosen(self._sequences, tokens, checked, [])
        computed = self._logprobs(logits, tokens)
        mx.async_eval(tokens, checked, computed)
        logprobs = [_Logprobs(self._logprobs, computed, self._sequences)]
        return Chosen(self._sequences, tokens, checked, logprobs)

    def _advance(
        self, tokens: Sequence[int] | None, faults: dict[int, Exception]
    ) -> np.ndarray | None:
        """Pass tokens to the grammars; returns masks, or None if every token may follow in all."""
        spent = self._spent
        shape = (len(self._constrained), words(self._vocabulary))
        allowed = np.full(shape, 0xFFFFFFFF, dtype=np.uint32)
        for mask, at in zip(allowed, self._constrained, strict=True):
            sequence, token = self._sequences[at], None if tokens is None else tokens[at]
            with masking(sequence):
                fill_mask(sequence, token, mask, faults, late=spent > self._most_seconds)
            spent += sequence.mask_seconds
        return allowed if (allowed != 0xFFFFFFFF).any() else None


def first_tokens(
    sequences: Sequence[ExecutorSequence],
    logits: mx.array,
    model: EngineModel,
    *,
    spent: float | None,
) -> Chosen:
    """Sample the tokens after a prefill from logits, [sequences, vocabulary].

    spent: as for `Chooser`.
    """
    pasts = [
        Past(sequence.history[:-1], len(sequence.prompt), sequence.longest)
        for sequence in sequences
    ]
    last = mx.array([sequence.history[-1] for sequence in sequences], dtype=mx.uint32)
    fed = Chosen(sequences, last, last, [])
    chosen = Chooser(sequences, pasts, model, spent=spent)(logits, fed, new=False)
    chosen.faults = fed.faults
    return chosen


@contextmanager
def masking(sequence: ExecutorSequence) -> Iterator[None]:
    """Add the processor time of the block to `mask_seconds` of the sequence."""
    started = time.thread_time()
    yield
    sequence.mask_seconds += time.thread_time() - started


def most_grammar_seconds(
    sequences: Sequence[ExecutorSequence], model: EngineModel, *, delays: bool = False
) -> float:
    """Return the seconds of processor time after which the grammars of one step are postponed.

    The time is infinite if every sequence has a grammar, or if the KV could not be stored.
    delays: whether other sequences wait for these grammars.
    """
    gains = delays or any(sequence.constraint is None for sequence in sequences)
    return _MOST_STALLS * model.stall_ms / 1e3 if gains and model.prompt_cache_bytes else math.inf


def fill_mask(
    sequence: ExecutorSequence,
    token: int | None,
    mask: np.ndarray,
    faults: dict[int, Exception],
    *,
    late: bool,
) -> bool:
    """Pass a token to a sequence's grammar, and fill the mask of what may follow.

    Returns False, with a mask that allows every token, if the grammar fails or has ended, because
    the sequence is about to end, and if the sequence is postponed.
    token: the latest token; None if the grammar has it.
    mask: [words], all ones.
    late: whether the grammars before took too long, so that the sequence is postponed.
    """
    rule = sequence.constraint
    assert rule is not None
    if token is not None and not sequence.first_delivered:
        accept(sequence, token, faults)
    if id(sequence) in faults or rule.ended:
        return False
    sequence.postponed = late
    if late:
        return False
    try:
        rule.fill(mask)
    except Exception as fault:
        faults[id(sequence)] = fault
        mask[:] = 0xFFFFFFFF
        return False
    return True


def accept(sequence: ExecutorSequence, token: int, faults: dict[int, Exception]) -> None:
    """Pass a token to the sequence's grammar, if it has one; `faults` collects exceptions."""
    if sequence.constraint is not None and not sequence.constraint.ended:
        try:
            sequence.constraint.accept(token)
        except Exception as refusal:
            faults[id(sequence)] = refusal


def read_early(
    chosen: Chosen, due: Callable[[ExecutorSequence], bool] = lambda _: True
) -> list[Sampled]:
    """Return tokens before a step is launched on them, and pass them to the grammars.

    Tokens of postponed sequences were sampled without their grammars, and are dropped.
    due: whether to read the token of a sequence.
    """
    tokens = chosen.read()
    read = [due(sequence) and not sequence.postponed for sequence in chosen.sequences]
    for sequence, token in compress(zip(chosen.sequences, tokens, strict=True), read):
        accept(sequence, token, chosen.faults)
        sequence.first_delivered = True
    return list(compress(sampled_of(chosen, tokens), read))


def sampled_of(chosen: Chosen, tokens: Sequence[int]) -> list[Sampled]:
    """Return the tokens with their log-probabilities and faults."""
    logprobs: dict[int, TokenLogprob] = {}
    for part in chosen.logprobs:
        # Some of these sequences may have left since.
        by_sequence = {
            id(sequence): token for sequence, token in zip(chosen.sequences, tokens, strict=True)
        }
        own = [by_sequence.get(id(sequence), 0) for sequence in part.sequences]
        for at, entry in part.batch.read(part.computed, own).items():
            logprobs[id(part.sequences[at])] = entry
    pairs = zip(chosen.sequences, tokens, strict=True)
    if not (logprobs or chosen.faults):
        return [
            (sequence, token, None, None, (rule := sequence.constraint) is not None and rule.ended)
            for sequence, token in pairs
        ]
    return [
        (
            sequence,
            token,
            logprobs.get(id(sequence)),
            chosen.faults.get(id(sequence)),
            grammar_ended(sequence),
        )
        for sequence, token in pairs
    ]


def fitting(checked: mx.array) -> tuple[list[int], list[int]]:
    """Wait for the result of `BatchSampler.checked`.

    Returns the tokens, and the indices of those from logits that are not finite, which become 0: a
    token that is safe to feed.
    """
    tokens: list[int] = checked.tolist()  # type: ignore[assignment]
    unfit = [at for at, token in enumerate(tokens) if token == UNFIT] if UNFIT in tokens else []
    for at in unfit:
        tokens[at] = 0
    return tokens, unfit


def grammar_ended(sequence: ExecutorSequence) -> bool:
    """Return whether the sequence's grammar is complete."""
    return sequence.constraint is not None and sequence.constraint.ended
