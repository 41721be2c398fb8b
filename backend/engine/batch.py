"""The running batch: every generating row takes one decode step together.

Steps overlap: a step launches the next forward pass on tokens that are still being computed, and
only then reads them, so the device works while Python hands out text. What a step returns is
therefore what the previous one sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from backend.engine import kv
from backend.engine.row import Row
from backend.engine.sampling import BatchSampler


class DecodeBatch:
    """Rows that decode together, and the rectangle of KV caches behind them."""

    def __init__(self, model: Any, end_tokens: frozenset[int]) -> None:
        self._model = model
        self._end_ids = mx.array(sorted(end_tokens)) if end_tokens else None
        self.rows: list[Row] = []
        self._cache: kv.BatchCache = []
        self._shared = False
        self._tokens: mx.array | None = None
        self._steps: list[int] = []
        self._held: list[list[int]] = []
        self._sampler: BatchSampler | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        return kv.nbytes(self._cache)

    def join(self, row: Row, cache: kv.RowCache) -> None:
        """Add a row whose cache holds all of its prompt but the last token.

        A model whose caches cannot be batched decodes one row, on the row's own cache.
        """
        last = mx.array([row.prompt[-1]], dtype=mx.uint32)
        if not kv.can_batch(cache):
            if self.rows:
                raise ValueError("this model's caches hold one sequence at a time")
            self._shared, self._cache, self._tokens = False, cache, last
        else:
            joining = kv.to_batch(cache)
            if self._tokens is None:
                self._cache, self._tokens = joining, last
            else:
                kv.extend(self._cache, joining)
                self._tokens = mx.concatenate([self._tokens, last])
            self._shared = True
        self.rows.append(row)
        self._steps.append(-1)
        self._held.append(list(row.prompt[:-1]))
        self._sampler = None

    def step(self) -> list[tuple[Row, int]]:
        """One decode step; returns (row, token) for every row that got a token.

        A row gets nothing in the step in which it joined: that step feeds its last prompt token.
        """
        assert self._tokens is not None
        fed, heard = self._tokens, [step >= 0 for step in self._steps]
        if not self._last_for_all():
            self._steps = [step + 1 for step in self._steps]
            logits = self._model(fed[:, None], cache=self._cache)[:, -1, :]
            self._tokens = self._sample(logits)
            mx.async_eval(self._tokens)
            mx.eval(fed)
            for held, token in zip(self._held, _ids(fed), strict=True):
                held.append(token)
        return [
            (row, token)
            for row, token, told in zip(self.rows, _ids(fed), heard, strict=True)
            if told
        ]

    def _last_for_all(self) -> bool:
        """Whether every row ends with the token at hand, so that no forward pass is needed."""
        return all(
            step >= 0 and len(row.generated) + 1 >= row.limit
            for row, step in zip(self.rows, self._steps, strict=True)
        )

    def extract(self, row: Row) -> tuple[kv.RowCache, list[int]]:
        """A copy of the row's KV, and the tokens that are in it."""
        at = self.rows.index(row)
        cache = kv.extract(self._cache, at) if self._shared else kv.clone(self._cache)
        return cache, list(self._held[at])

    def remove(self, leaving: Sequence[Row]) -> None:
        """Drop rows; their slots are free at once."""
        gone = set(map(id, leaving))
        stay = [at for at, row in enumerate(self.rows) if id(row) not in gone]
        if len(stay) == len(self.rows):
            return
        self._sampler = None
        if not stay:
            self.clear()
            return
        kv.keep(self._cache, stay)
        assert self._tokens is not None
        self._tokens = self._tokens[mx.array(stay)]
        self.rows = [self.rows[at] for at in stay]
        self._steps = [self._steps[at] for at in stay]
        self._held = [self._held[at] for at in stay]

    def clear(self) -> None:
        self.rows, self._steps, self._held, self._cache = [], [], [], []
        self._tokens = self._sampler = None

    def _sample(self, logits: mx.array) -> mx.array:
        if self._sampler is None:
            self._sampler = BatchSampler(
                [row.request.sampling for row in self.rows],
                [self._end_ids if row.request.ignore_eos else None for row in self.rows],
            )
        return self._sampler(logits, self._steps)


def _ids(tokens: mx.array) -> list[int]:
    return cast(list[int], tokens.tolist())
