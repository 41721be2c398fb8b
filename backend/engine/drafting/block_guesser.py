"""Guesses with DFlash (https://arxiv.org/abs/2602.06036): a block of tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.drafting.block_head import BlockHead
from backend.engine.drafting.drafter import GuessRequest
from backend.engine.drafting.state_guesser import StateGuesser, padded


class BlockGuesser(StateGuesser):
    """A `Guesser` with a `BlockHead`, whose KV contains states of the model but no guesses."""

    _head: BlockHead

    def _drop_guesses(self) -> None:
        pass  # the KV contains none

    def _read(self, tokens: Sequence[int], states: mx.array, row: kv.RowCache) -> None:  # noqa: ARG002, it reads states alone
        self._head.read(states[None], row)

    def _guess(
        self, able: dict[int, GuessRequest], unread: list[mx.array | None]
    ) -> dict[int, list[int]]:
        counts = [0 if own is None else own.shape[0] for own in unread]
        width = max(counts)
        self._head.read(padded(unread, width), self._cache.layers)
        self._cache.drop([width - count for count in counts])
        # As many as in training: a shorter block would get worse guesses.
        size = self._head.longest
        last = [able[one].tokens[-1] if one in able else 0 for one in self._sequences]
        best, shares = self._choices.best(self._head.fill(last, size, self._cache.layers))
        found: dict[int, list[int]] = {}
        for number, own, sure in zip(self._sequences, best, shares, strict=True):
            if number in able:
                probable = (share >= self._least_probability for share in sure)
                count = next((at for at, is_sure in enumerate(probable) if not is_sure), size)
                found[number] = own[: min(count, able[number].most)]
        return found
