"""Drafters with a head that reads the model's hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.drafting.batch_drafter import BatchDrafter, padded
from backend.engine.drafting.drafter import DraftRequest
from backend.engine.drafting.trained_heads import BlockHead
from backend.engine.planning.draft_width import NEAR


class StateDrafter(BatchDrafter, ABC):
    """The base of drafters with a head, which reads hidden states that the model has computed.

    The head's KV begins with the latest tokens of the prompt. It lacks tokens whose states were not
    stored (`UnreadStates`), so fewer draft tokens are right.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int] | None]:
        able: dict[int, DraftRequest] = {}
        unread: dict[int, mx.array] = {}
        for request in requests:
            states = request.states.take() if request.states is not None else None
            if states is not None:
                able[request.sequence], unread[request.sequence] = request, states
        if not able:
            return [None for _ in requests]
        self._cache.drop([len(self._drafted.pop(number, ())) for number in self._sequences])
        for number, states in unread.items():
            if number not in self._sequences or states.shape[0] > NEAR:
                unread[number] = self._catch_up(able[number], states)
        found = self._next_drafts(able, [unread.get(number) for number in self._sequences])
        return [found.get(request.sequence) for request in requests]

    def _catch_up(self, request: DraftRequest, states: mx.array) -> mx.array:
        """Read all but the last state of a sequence, which joins the batch; return the last one."""
        row = self._take_out(request.sequence)
        count = states.shape[0]
        if count > 1:
            self._read(request.tokens[-count:-1], states[:-1], row)
        self._join({request.sequence: row})
        return states[-1:]

    @abstractmethod
    def _read(self, tokens: Sequence[int], states: mx.array, row: kv.RowCache) -> None:
        """Append tokens, and the states from which they were chosen, to the KV of a sequence."""

    @abstractmethod
    def _next_drafts(
        self, able: dict[int, DraftRequest], unread: list[mx.array | None]
    ) -> dict[int, list[int]]:
        """Read the unread states of all sequences, and draft for the sequences in `able`."""


class HeadDrafter(StateDrafter):
    """A `Drafter` with a head that predicts one token at a time: the model's own, or EAGLE-3.

    The head reads tokens with the model's states, and its draft tokens with the head's own states.
    """

    def _read(self, tokens: Sequence[int], states: mx.array, row: kv.RowCache) -> None:
        self._head(mx.array([list(tokens)]), states[None], cache=row)

    def _next_drafts(
        self, able: dict[int, DraftRequest], unread: list[mx.array | None]
    ) -> dict[int, list[int]]:
        first: list[Sequence[int]] = [
            [] if own is None else able[number].tokens[-own.shape[0] :]
            for number, own in zip(self._sequences, unread, strict=True)
        ]
        latest: mx.array | None = None

        def run(fed: Sequence[Sequence[int]]) -> mx.array:
            nonlocal latest
            states = unread
            if latest is not None:
                states = [latest[at] if own else None for at, own in enumerate(fed)]
            latest = self._run(fed, states)
            return latest

        return self._draft_in_turn(first, {n: sequence.most for n, sequence in able.items()}, run)


class BlockDrafter(StateDrafter):
    """A `Drafter` with DFlash (https://arxiv.org/abs/2602.06036): a block of tokens in one pass.

    The KV of the `BlockHead` contains states of the model, but no draft tokens.
    """

    _head: BlockHead

    def _read(self, tokens: Sequence[int], states: mx.array, row: kv.RowCache) -> None:  # noqa: ARG002, it reads states alone
        self._head.append(states[None], row)

    def _next_drafts(
        self, able: dict[int, DraftRequest], unread: list[mx.array | None]
    ) -> dict[int, list[int]]:
        counts = [0 if own is None else own.shape[0] for own in unread]
        width = max(counts)
        self._head.append(padded(unread, width), self._layers)
        self._cache.drop([width - count for count in counts])
        # As many as in training: fewer tokens of a shorter block would be right.
        size = self._head.longest
        last = [able[n].tokens[-1] if n in able else 0 for n in self._sequences]
        best, shares = self._choices.best(self._head.fill(last, size, self._layers))
        found: dict[int, list[int]] = {}
        for number, own, sure in zip(self._sequences, best, shares, strict=True):
            if number in able:
                probable = (share >= self._least_probability for share in sure)
                count = next((at for at, is_sure in enumerate(probable) if not is_sure), size)
                found[number] = own[: min(count, able[number].most)]
        return found
