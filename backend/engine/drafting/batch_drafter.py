"""Drafters that run a model or a head for all sequences of a batch together."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.drafting.drafter import DraftRequest
from backend.engine.drafting.heads import BlockHead, Choices
from backend.engine.planning.draft_width import CATCH_UP, NEAR
from backend.engine.planning.pace import Pace
from backend.engine.sampling.logits_head import LogitsHead
from common.prefixes import common_prefix

LEAST_PROBABILITY = 0.5  # of a draft token, as the draft model or head computes it


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


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A loaded draft model."""

    model: Any
    # Number of logits of the draft model and of the main model, which may have different padding.
    vocabulary: int
    main_vocabulary: int
    longest: int  # the draft model's context in tokens
    # Its output projection, which computes one token per row; None if all logits are computed.
    head: LogitsHead | None = None


class ModelDrafter(BatchDrafter):
    """A `Drafter` with a draft model.

    Draft tokens are the draft model's likeliest tokens, up to the first whose probability is too
    low. A sequence that is new, or had no draft tokens for a long time, catches up alone before it
    joins the others: each call prefills a chunk of one such sequence. `pace` sets the chunk's
    length.
    """

    def __init__(
        self, draft: DraftModel, pace: Pace, least_probability: float = LEAST_PROBABILITY
    ) -> None:
        choices = Choices(lambda logits: logits, draft.main_vocabulary)
        super().__init__(draft.model, choices, least_probability)
        self._draft = draft
        self._pace = pace
        self._cached: dict[int, int] = {}  # by sequence, how many of its tokens are in its KV
        self._behind: dict[int, kv.RowCache] = {}  # the KV of sequences that catch up, in order

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(map(kv.nbytes, self._behind.values()))

    def forget(self, sequences: Collection[int]) -> None:
        super().forget(sequences)
        for sequence in sequences:
            self._cached.pop(sequence, None)
            self._behind.pop(sequence, None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int] | None]:
        able = {request.sequence: request for request in requests if self._can_follow(request)}
        self.forget([request.sequence for request in requests if request.sequence not in able])
        self._drop_wrong_drafts(able)
        self._catch_up(able)
        found = self._next_drafts(able)
        return [
            found.get(request.sequence) if request.sequence in able else [] for request in requests
        ]

    def _can_follow(self, request: DraftRequest) -> bool:
        """Return whether the draft model knows the new token ids and has context for another."""
        new = request.tokens[self._cached.get(request.sequence, 0) :]
        return (
            len(request.tokens) < self._draft.longest
            and max(new, default=0) < self._draft.vocabulary
        )

    def _drop_wrong_drafts(self, requests: dict[int, DraftRequest]) -> None:
        """Truncate the KV after the draft tokens that were right, and before the last token."""
        dropped = [0] * len(self._sequences)
        for at, number in enumerate(self._sequences):
            if number in requests:
                tokens, cached = requests[number].tokens, self._cached[number]
                drafted = self._drafted.pop(number, [])
                right = common_prefix(drafted, tokens[cached:])
                self._cached[number] = min(cached + right, len(tokens) - 1)
                dropped[at] = cached + len(drafted) - self._cached[number]
        self._cache.drop(dropped)

    def _catch_up(self, requests: dict[int, DraftRequest]) -> None:
        """Prefill a chunk of one sequence that misses tokens; add those that miss few."""
        for number in requests:
            new = self._cached.setdefault(number, 0) == 0
            if number not in self._behind and (new or self._missing(requests[number]) > NEAR):
                self._behind[number] = self._take_out(number)
        behind = [requests[number] for number in self._behind if number in requests]
        for request in behind[:1]:
            self._feed(request)
        ready = [request.sequence for request in behind if self._missing(request) <= NEAR]
        if ready:
            self._join({number: self._behind.pop(number) for number in ready})

    def _missing(self, request: DraftRequest) -> int:
        """Return how many of a sequence's tokens are not in its KV."""
        return len(request.tokens) - self._cached[request.sequence]

    def _feed(self, request: DraftRequest) -> None:
        number, row = request.sequence, self._behind[request.sequence]
        most = min(self._pace.tokens(running=True), CATCH_UP)
        chunk = request.tokens[self._cached[number] : -1][:most]
        if chunk:
            started = time.perf_counter()
            self._head(mx.array([chunk]), cache=row)
            kv.evaluate(row)
            self._pace.measured(len(chunk), time.perf_counter() - started)
            self._cached[number] += len(chunk)

    def _next_drafts(self, requests: dict[int, DraftRequest]) -> dict[int, list[int]]:
        most: dict[int, int] = {}
        first: list[Sequence[int]] = []
        for number in self._sequences:
            request = requests.get(number)
            first.append([] if request is None else request.tokens[self._cached[number] :])
            if request is not None:
                most[number] = min(request.most, self._draft.longest - len(request.tokens))
        found = self._draft_in_turn(first, most, self._run)
        self._cached |= {number: len(requests[number].tokens) for number in most}
        return found

    def _last(self, run: Callable[[], mx.array], counts: Sequence[int]) -> mx.array:
        if self._draft.head is None:
            return super()._last(run, counts)
        return self._draft.head.last(run, counts)[:, None]


class StateDrafter(BatchDrafter, ABC):
    """The base of drafters with a head, which reads hidden states that the model has computed.

    The head's KV begins with the latest tokens of the prompt. It lacks tokens whose states were not
    stored (`UnreadStates`), or whose KV the sequence had in stored form, so fewer draft tokens are
    right.
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
