"""The running batch: every generating row takes one decode step together.

Steps overlap: a step launches the next forward pass on tokens that are still being computed, and
only then reads them, so the device works while Python hands out text. What a step returns is
therefore what the previous one sampled. A grammar has to see a token before it can say what may
follow, so with constrained rows the tokens are read, and the masks filled, while the forward pass
runs; only choosing the next tokens waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np

from backend.engine import kv
from backend.engine.constraints.constraint import words
from backend.engine.drafting.loading import Drafting
from backend.engine.events import TokenLogprob
from backend.engine.logprobs import BatchLogprobs, Told
from backend.engine.penalties import Past
from backend.engine.row import Row
from backend.engine.sampling import BatchSampler
from backend.engine.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step tells of a row: its token, and the fault that ends the row, if there is one."""

    row: Row
    token: int
    logprob: TokenLogprob | None = None
    fault: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Choosers:
    """What chooses tokens for a fixed set of rows; `constrained` holds the places of those."""

    sampler: BatchSampler
    logprobs: BatchLogprobs
    constrained: tuple[int, ...]


class DecodeBatch:
    """Rows that decode together, and the rectangle of KV caches behind them."""

    def __init__(
        self,
        model: Any,
        end_tokens: frozenset[int],
        vocabulary: int,
        drafting: Drafting | None = None,
    ) -> None:
        self._model = model
        self._end_ids = sorted(end_tokens)
        self._vocabulary = vocabulary
        self.rows: list[Row] = []
        self._cache = kv.BatchCache()
        self._tokens: mx.array | None = None
        self._steps: list[int] = []
        self._held: list[list[int]] = []
        self._choosers: _Choosers | None = None
        self._pending: tuple[BatchLogprobs, Told, list[Row]] | None = None
        self._speculation: Speculation | None = None
        if drafting is not None:
            self._speculation = Speculation(drafting, model, vocabulary, self._end_ids)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def join(self, row: Row, cache: kv.RowCache) -> None:
        """Add a row whose cache holds all of its prompt but the last token.

        Raises ValueError for a second row of a model whose caches cannot be batched.
        """
        self._cache.join([cache])
        last = mx.array([row.prompt[-1]], dtype=mx.uint32)
        tokens = self._tokens
        self._tokens = last if tokens is None else mx.concatenate([tokens, last])
        self.rows.append(row)
        self._steps.append(-1)
        self._held.append(list(row.prompt[:-1]))
        self._choosers = None

    def step(self) -> list[Sampled]:
        """One decode step; returns what there is to tell, for every row that got a token.

        A row gets nothing in the step in which it joined: that step feeds its last prompt token.
        Guesses that held are told at once, so a row may get several tokens.
        """
        assert self._tokens is not None
        if (ahead := self._run_ahead()) is not None:
            return ahead
        fed, heard, pending = self._tokens, [step >= 0 for step in self._steps], self._pending
        choosers = self._choosers or self._choose_choosers()
        logits = None
        if not self._last_for_all():
            self._steps = [step + 1 for step in self._steps]
            logits = self._model(fed[:, None], cache=self._cache.layers)[:, -1, :]
        allowed: np.ndarray | None = None
        faults: dict[int, Exception] = {}
        if choosers.constrained:
            if logits is not None:
                mx.async_eval(logits)
            allowed, faults = self._advance(choosers.constrained, _ids(fed), heard)
        if logits is not None:
            self._launch(choosers, logits, fed, allowed)
        tokens = _ids(fed)
        if logits is not None:
            for held, token in zip(self._held, tokens, strict=True):
                held.append(token)
        told = {} if pending is None else self._read(*pending, tokens)
        return [
            Sampled(row, token, told.get(id(row)), faults.get(at))
            for at, (row, token) in enumerate(zip(self.rows, tokens, strict=True))
            if heard[at]
        ]

    def _run_ahead(self) -> list[Sampled] | None:
        """A step with guesses, where one row decodes and there are any; else None, and no step."""
        if self._speculation is None or not self._speculation.fits(
            self.rows, len(self._held[0]) + 1
        ):
            return None
        assert self._tokens is not None
        row, held, step = self.rows[0], self._held[0], self._steps[0]
        (token,) = _ids(self._tokens)
        tokens = self._speculation.advance(row, self._cache.layers, held, token, step + 1)
        if not tokens:
            return None
        told = [token, *tokens[:-1]]
        held.extend(told)
        self._steps[0] += len(tokens)
        self._tokens = mx.array(tokens[-1:], dtype=mx.uint32)
        return [Sampled(row, one) for one in (told if step >= 0 else told[1:])]

    def _launch(
        self, choosers: _Choosers, logits: mx.array, fed: mx.array, allowed: np.ndarray | None
    ) -> None:
        """Start computing the next tokens, and what is told of them."""
        self._tokens = choosers.sampler(logits, fed, self._steps, allowed)
        self._pending = None
        if not choosers.logprobs:
            mx.async_eval(self._tokens)
            return
        told = choosers.logprobs(logits, self._tokens)
        self._pending = (choosers.logprobs, told, list(self.rows))
        mx.async_eval(self._tokens, told.arrays)

    def _advance(
        self, constrained: Sequence[int], fed: Sequence[int], heard: Sequence[bool]
    ) -> tuple[np.ndarray, dict[int, Exception]]:
        """Let the grammars see their latest tokens, and fill the masks of what may follow.

        A grammar that fails, or has ended, leaves its row unmasked: the row is about to go.
        """
        allowed = np.full((len(constrained), words(self._vocabulary)), 0xFFFFFFFF, dtype=np.uint32)
        faults: dict[int, Exception] = {}
        for mask, at in zip(allowed, constrained, strict=True):
            constraint = self.rows[at].constraint
            assert constraint is not None
            try:
                if heard[at] and not constraint.ended:
                    constraint.accept(fed[at])
                if not constraint.ended:
                    constraint.fill(mask)
            except Exception as fault:
                faults[at] = fault
                mask[:] = 0xFFFFFFFF
        return allowed, faults

    def _read(
        self, logprobs: BatchLogprobs, told: Told, rows: Sequence[Row], tokens: Sequence[int]
    ) -> dict[int, TokenLogprob]:
        """The log-probabilities of the tokens, by the row's identity: rows came and went since."""
        fed = {id(row): token for row, token in zip(self.rows, tokens, strict=True)}
        chosen = [fed.get(id(row), 0) for row in rows]
        return {id(rows[at]): entry for at, entry in logprobs.read(told, chosen).items()}

    def _last_for_all(self) -> bool:
        """Whether every row ends with the token at hand, so that no forward pass is needed."""
        return all(
            step >= 0 and len(row.generated) + 1 >= row.limit
            for row, step in zip(self.rows, self._steps, strict=True)
        )

    def extract(self, row: Row) -> tuple[kv.RowCache, list[int]]:
        """A copy of the row's KV, and the tokens that are in it."""
        at = self.rows.index(row)
        return self._cache.extract(at), list(self._held[at])

    def remove(self, leaving: Sequence[Row]) -> None:
        """Drop rows; their slots are free at once."""
        gone = set(map(id, leaving))
        stay = [at for at, row in enumerate(self.rows) if id(row) not in gone]
        if len(stay) == len(self.rows):
            return
        self._choosers = None
        if self._speculation is not None:
            self._speculation.left(leaving)
        if not stay:
            self.clear()
            return
        self._cache.leave([at for at, row in enumerate(self.rows) if id(row) in gone])
        assert self._tokens is not None
        self._tokens = self._tokens[mx.array(stay)]
        self.rows = [self.rows[at] for at in stay]
        self._steps = [self._steps[at] for at in stay]
        self._held = [self._held[at] for at in stay]

    def clear(self) -> None:
        self.rows, self._steps, self._held, self._cache = [], [], [], kv.BatchCache()
        self._tokens = self._choosers = self._pending = None
        if self._speculation is not None:
            self._speculation.forget()

    def _choose_choosers(self) -> _Choosers:
        requests = [row.request for row in self.rows]
        constrained = [at for at, row in enumerate(self.rows) if row.constraint is not None]
        self._choosers = _Choosers(
            BatchSampler(
                [request.sampling for request in requests],
                [
                    Past(held, len(row.prompt), row.longest)
                    for row, held in zip(self.rows, self._held, strict=True)
                ],
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
