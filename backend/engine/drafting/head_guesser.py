"""Guesses with the model's own head for multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.drafting.drafter import GuessRequest

LEAST_PROBABILITY = 0.5  # lowest probability, according to the head, at which a guess is made


class HeadGuesser:
    """A `Guesser` with a `PredictionHead`, which runs for all sequences of a batch together.

    The head reads hidden states that the model computed anyway, so it needs no pass over the
    prompt: its KV begins with the first token of the answer. Tokens that were generated while no
    guesses were requested are missing from it, which only makes guesses worse.

    head: called like `PredictionHead`. project: turns hidden states into logits. vocabulary: the
    width of the logits.
    """

    def __init__(
        self,
        head: Any,
        project: Callable[[mx.array], mx.array],
        vocabulary: int,
        least_probability: float = LEAST_PROBABILITY,
    ) -> None:
        self._head = head
        self._project = project
        self._vocabulary = vocabulary
        self._least_probability = least_probability
        self._cache = kv.BatchCache()
        self._sequences: list[int] = []  # in the order of the cache
        # of each sequence, how many of its latest tokens in the cache were guesses
        self._guessed: list[int] = []

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def forget(self, sequences: Collection[int]) -> None:
        gone = set(sequences)
        places = [at for at, one in enumerate(self._sequences) if one in gone]
        stay = [at for at, one in enumerate(self._sequences) if one not in gone]
        self._sequences = [self._sequences[at] for at in stay]
        self._guessed = [self._guessed[at] for at in stay]
        self._cache.leave(places)

    def propose(self, requests: Sequence[GuessRequest]) -> list[list[int] | None]:
        able = {one.sequence: one for one in requests if one.states is not None}
        if not able:
            return [None for _ in requests]
        new = [number for number in able if number not in self._sequences]
        self._cache.drop(self._guessed)
        self._cache.join([(kv.new_row(self._head), 0) for _ in new])
        self._sequences += new
        self._guessed = [0] * len(self._sequences)
        found = self._guess(able)
        return [found.get(one.sequence) for one in requests]

    def _guess(self, able: dict[int, GuessRequest]) -> dict[int, list[int]]:
        """The guesses, each from the head's state after the token before it."""
        fed: list[Sequence[int]] = [[] for _ in self._sequences]
        states: list[mx.array | None] = [None] * len(fed)
        for at, number in enumerate(self._sequences):
            if (one := able.get(number)) is not None and one.states is not None:
                fed[at], states[at] = one.tokens[-one.states.shape[0] :], one.states
        found: dict[int, list[int]] = {number: [] for number in able}
        active = dict(able)
        while True:
            latest, best = self._run(fed, states)
            for at, number in enumerate(self._sequences):
                fed[at], states[at] = [], None
                if number not in active:
                    continue
                guess, probability = best[at]
                own = found[number]
                sure = probability >= self._least_probability
                if sure:
                    own.append(guess)
                if not sure or len(own) >= active[number].most:
                    del active[number]
                    continue
                fed[at], states[at] = [guess], latest[at]
                self._guessed[at] += 1
            if not active:
                return found

    def _run(
        self, fed: Sequence[Sequence[int]], states: Sequence[mx.array | None]
    ) -> tuple[mx.array, list[tuple[int, float]]]:
        """Feed each sequence tokens with their hidden states.

        Returns the head's state after the last token of each, [sequences, 1, size], and the best
        next token with its probability.
        """
        width = max(map(len, fed))
        like = next(one for one in states if one is not None)
        padded = [
            mx.zeros((width, like.shape[-1]), like.dtype)
            if own is None
            else mx.pad(own, [(0, width - own.shape[0]), (0, 0)])
            for own in states
        ]
        tokens = [[*own, *[0] * (width - len(own))] for own in fed]
        layers = self._cache.layers_for(width)
        found = self._head(mx.array(tokens), mx.stack(padded), cache=layers)
        self._cache.drop([width - len(own) for own in fed])
        last = mx.array([max(len(own) - 1, 0) for own in fed])[:, None, None]
        latest = mx.take_along_axis(found, last, axis=1)
        logits = self._project(latest)[:, 0, : self._vocabulary].astype(mx.float32)
        guesses = mx.argmax(logits, axis=-1)
        shares = mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1))
        mx.eval(guesses, shares)
        best = zip(
            cast(list[int], guesses.tolist()), cast(list[float], shares.tolist()), strict=True
        )
        return latest, list(best)
