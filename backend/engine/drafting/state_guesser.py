"""The base of guessers that read the model's hidden states and keep KV of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.drafting.drafter import GuessRequest

LEAST_PROBABILITY = 0.5  # lowest probability, according to the head, at which a guess is made
_NEAR = 32  # tokens that a sequence may be behind and still be read together with the others


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """How a head's states become tokens.

    project: from states [..., size] to logits [..., n]. vocabulary: how many of these are tokens.
    tokens: the model's ids of those, [vocabulary]; None if they are the same.
    """

    project: Callable[[mx.array], mx.array]
    vocabulary: int
    tokens: mx.array | None = None

    def best(self, states: mx.array) -> tuple[Any, Any]:
        """The best token after each state [...], and its probability, as nested lists."""
        logits = self.project(states)[..., : self.vocabulary].astype(mx.float32)
        guesses = mx.argmax(logits, axis=-1)
        shares = mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1))
        if self.tokens is not None:
            guesses = self.tokens[guesses]
        mx.eval(guesses, shares)
        return guesses.tolist(), shares.tolist()


class StateGuesser(ABC):
    """A `Guesser` with a head, which runs for all sequences of a batch together.

    The head reads hidden states that the model computed anyway, so it needs no pass of the model.
    Its KV begins with the latest tokens of the prompt, and lacks those whose states are not known
    (`UnreadStates`), which only makes guesses worse.

    head: has KV that `kv.new_row` makes.
    """

    def __init__(self, head: Any, choices: Choices) -> None:
        self._head = head
        self._choices = choices
        self._least_probability = LEAST_PROBABILITY
        self._cache = kv.BatchCache()
        self._sequences: list[int] = []  # in the order of the cache

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def forget(self, sequences: Collection[int]) -> None:
        gone = set(sequences)
        places = [at for at, one in enumerate(self._sequences) if one in gone]
        self._sequences = [one for one in self._sequences if one not in gone]
        self._cache.leave(places)

    def propose(self, requests: Sequence[GuessRequest]) -> list[list[int] | None]:
        able: dict[int, GuessRequest] = {}
        unread: dict[int, mx.array] = {}
        for one in requests:
            states = one.states.take() if one.states is not None else None
            if states is not None:
                able[one.sequence], unread[one.sequence] = one, states
        if not able:
            return [None for _ in requests]
        self._drop_guesses()
        for number, states in unread.items():
            if number not in self._sequences or states.shape[0] > _NEAR:
                unread[number] = self._catch_up(able[number], states)
        found = self._guess(able, [unread.get(number) for number in self._sequences])
        return [found.get(one.sequence) for one in requests]

    def _catch_up(self, one: GuessRequest, states: mx.array) -> mx.array:
        """Read all but the last state of a sequence, which then joins; returns the last one."""
        if one.sequence in self._sequences:
            row = self._cache.extract(self._sequences.index(one.sequence))
            self.forget([one.sequence])
        else:
            row = kv.new_row(self._head)
        count = states.shape[0]
        if count > 1:
            self._read(one.tokens[-count:-1], states[:-1], row)
        self._cache.join([(row, 0)])
        self._sequences.append(one.sequence)
        return states[-1:]

    @abstractmethod
    def _drop_guesses(self) -> None:
        """Remove from the KV what was guessed in the previous step."""

    @abstractmethod
    def _read(self, tokens: Sequence[int], states: mx.array, row: kv.RowCache) -> None:
        """Append tokens, and the states that they were chosen from, to the KV of one sequence."""

    @abstractmethod
    def _guess(
        self, able: dict[int, GuessRequest], unread: list[mx.array | None]
    ) -> dict[int, list[int]]:
        """Read the states, in the order of the sequences, and guess for those in `able`."""


def padded(states: Sequence[mx.array | None], width: int) -> mx.array:
    """States of several sequences, each [tokens, size] or None, as [sequences, width, size]."""
    like = next(one for one in states if one is not None)
    return mx.stack(
        [
            mx.zeros((width, like.shape[-1]), like.dtype)
            if own is None
            else mx.pad(own, [(0, width - own.shape[0]), (0, 0)])
            for own in states
        ]
    )
