"""The base of drafters that run a model or a head for all sequences of a batch together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from backend.engine.caching import kv

LEAST_PROBABILITY = 0.5  # of a draft token, as the draft model or head computes it


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """How the states of a draft model or head become tokens."""

    project: Callable[[mx.array], mx.array]  # returns logits [..., n] for states [..., size]
    vocabulary: int  # number of tokens; later logits are padding
    # The main model's id of each token, [vocabulary]; None if the ids are equal.
    tokens: mx.array | None = None

    def best(self, states: mx.array) -> tuple[Any, Any]:
        """Return the best token after each state [...], and its probability, as nested lists."""
        logits = self.project(states)[..., : self.vocabulary].astype(mx.float32)
        drafts = mx.argmax(logits, axis=-1)
        shares = mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1))
        if self.tokens is not None:
            drafts = self.tokens[drafts]
        mx.eval(drafts, shares)
        return drafts.tolist(), shares.tolist()


class BatchDrafter:
    """Stores the drafter's KV of the sequences in a batch, and feeds all of them in one pass.

    head: the draft model or head. `kv.new_row` creates its KV.
    """

    def __init__(
        self, head: Any, choices: Choices, least_probability: float = LEAST_PROBABILITY
    ) -> None:
        self._head = head
        self._choices = choices
        self._least_probability = least_probability
        self._cache = kv.BatchCache()
        self._sequences: list[int] = []  # in the order of the cache
        self._drafted: dict[int, list[int]] = {}  # by sequence, draft tokens at the end of its KV

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def forget(self, sequences: Collection[int]) -> None:
        gone = set(sequences)
        self._cache.leave([at for at, number in enumerate(self._sequences) if number in gone])
        self._sequences = [number for number in self._sequences if number not in gone]
        for number in gone:
            self._drafted.pop(number, None)

    @property
    def _layers(self) -> list[Any]:
        """The KV of the batch. If it must be copied, arrays are copied one after another."""
        layers = self._cache.layers
        if self._cache.copied:
            kv.start_copies([layers])
            self._cache.copied = False
        return layers

    def _join(self, rows: Mapping[int, kv.RowCache]) -> None:
        """Add the KV of sequences to the batch."""
        self._cache.join([(row, 0) for row in rows.values()])
        self._sequences += rows

    def _take_out(self, sequence: int) -> kv.RowCache:
        """Remove a sequence's KV from the batch and return it; return empty KV for a new sequence.

        So a sequence that misses many tokens catches up alone.
        """
        if sequence not in self._sequences:
            return kv.new_row(self._head)
        at = self._sequences.index(sequence)
        row = self._cache.extract(at)
        self._cache.leave([at])
        self._sequences.remove(sequence)
        return row

    def _draft_in_turn(
        self,
        fed: Sequence[Sequence[int]],
        most: Mapping[int, int],
        run: Callable[[Sequence[Sequence[int]]], mx.array],
    ) -> dict[int, list[int]]:
        """Draft tokens one after another, and return them by sequence.

        Drafting for a sequence ends at its number in `most`, or when a token is too improbable.
        Draft tokens that were fed remain in the KV, and in `_drafted`, until the next call.

        fed: the first tokens to feed to each sequence of the batch.
        run: feeds tokens, and returns the result after the last token of each sequence.
        """
        found: dict[int, list[int]] = {number: [] for number in most}
        active = set(most)
        while active:
            best, shares = self._choices.best(run(fed)[:, 0])
            following: list[list[int]] = [[] for _ in self._sequences]
            for at, number in enumerate(self._sequences):
                if number not in active:
                    continue
                own, sure = found[number], shares[at] >= self._least_probability
                if sure:
                    own.append(best[at])
                if sure and len(own) < most[number]:
                    following[at] = [best[at]]
                    self._drafted.setdefault(number, []).append(best[at])
                else:
                    active.remove(number)
            fed = following
        return found

    def _run(
        self, fed: Sequence[Sequence[int]], states: Sequence[mx.array | None] | None = None
    ) -> mx.array:
        """Feed tokens to each sequence, with their hidden states if the head reads hidden states.

        Returns the result after the last token of each sequence, [sequences, 1, size].
        """
        width = max(map(len, fed))
        tokens = kv.padded(fed)
        beside = () if states is None else (padded(states, width),)
        layers = self._layers
        found = self._last(
            lambda: self._head(tokens, *beside, cache=layers), [max(len(own), 1) for own in fed]
        )
        self._cache.drop([width - len(own) for own in fed])
        return found

    def _last(self, run: Callable[[], mx.array], counts: Sequence[int]) -> mx.array:
        """Return the result of `run` after the last token of each row, [rows, 1, size].

        counts: number of tokens of each row, before the padding.
        """
        positions = mx.array(list(counts))[:, None, None] - 1
        return mx.take_along_axis(run(), positions, axis=1)


def padded(states: Sequence[mx.array | None], width: int) -> mx.array:
    """Return states, each [tokens, size] or None, as one array, [sequences, width, size]."""
    like = next(row for row in states if row is not None)
    return mx.stack(
        [
            mx.zeros((width, like.shape[-1]), like.dtype)
            if own is None
            else mx.pad(own, [(0, width - own.shape[0]), (0, 0)])
            for own in states
        ]
    )
