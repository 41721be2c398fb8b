"""Guesses with a head that predicts one token at a time: the model's own, or EAGLE-3."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.drafting.drafter import GuessRequest
from backend.engine.drafting.state_guesser import (
    Choices,
    StateGuesser,
    padded,
)


class HeadGuesser(StateGuesser):
    """A `Guesser` that feeds a head the tokens with the model's states, and its guesses with its
    own.

    head: called like `PredictionHead` and `EagleHead`.
    """

    def __init__(self, head: Any, choices: Choices) -> None:
        super().__init__(head, choices)
        # by sequence, how many of its latest tokens in the cache were guesses
        self._guessed: dict[int, int] = {}

    def forget(self, sequences: Collection[int]) -> None:
        super().forget(sequences)
        for number in sequences:
            self._guessed.pop(number, None)

    def _drop_guesses(self) -> None:
        self._cache.drop([self._guessed.pop(number, 0) for number in self._sequences])

    def _read(self, tokens: Sequence[int], states: mx.array, row: kv.RowCache) -> None:
        self._head(mx.array([list(tokens)]), states[None], cache=row)

    def _guess(
        self, able: dict[int, GuessRequest], unread: list[mx.array | None]
    ) -> dict[int, list[int]]:
        """The guesses, each from the head's state after the token before it."""
        states = unread
        fed: list[Sequence[int]] = [
            [] if own is None else able[number].tokens[-own.shape[0] :]
            for number, own in zip(self._sequences, states, strict=True)
        ]
        found: dict[int, list[int]] = {number: [] for number in able}
        active = dict(able)
        while True:
            latest = self._run(fed, states)
            best, shares = self._choices.best(latest[:, 0])
            for at, number in enumerate(self._sequences):
                fed[at], states[at] = [], None
                if number not in active:
                    continue
                own = found[number]
                sure = shares[at] >= self._least_probability
                if sure:
                    own.append(best[at])
                if not sure or len(own) >= active[number].most:
                    del active[number]
                    continue
                fed[at], states[at] = [best[at]], latest[at]
                self._guessed[number] = len(own)
            if not active:
                return found

    def _run(self, fed: Sequence[Sequence[int]], states: Sequence[mx.array | None]) -> mx.array:
        """Feed each sequence tokens with their hidden states.

        Returns the head's state after the last token of each, [sequences, 1, size].
        """
        width = max(map(len, fed))
        tokens = [[*own, *[0] * (width - len(own))] for own in fed]
        layers = self._cache.layers
        found = self._head(mx.array(tokens), padded(states, width), cache=layers)
        self._cache.drop([width - len(own) for own in fed])
        last = mx.array([max(len(own) - 1, 0) for own in fed])[:, None, None]
        return mx.take_along_axis(found, last, axis=1)
