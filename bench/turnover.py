"""The cost of replacing one sequence of a batch, against mlx-lm's own batches.

The shape is SmolLM2's: 30 layers with 3 KV heads of 64 values in float32, which is 45 MiB for each
sequence of 1,024 tokens. Buffer addresses show what was copied: a buffer at a new address was
written completely; into a buffer at the same address only the joining sequence was copied.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache

from backend.engine.caching.kv import BatchCache, RowCache
from backend.engine.caching.layer_kv import LayerKV
from bench.report import Figure, at_most, fact

LAYERS, HEADS, DIM = 30, 3, 64
SEQUENCES = 8
TOKENS = 1024
ROUNDS = 5
# joins and leaves
CHANGES = {"leave": (0, 1), "join": (1, 0), "turnover": (1, 1)}
_PART = HEADS * TOKENS * DIM * 4  # bytes of one sequence's keys, or values, in a layer


def measure() -> Iterator[Figure]:
    """After every change each row gets one more token, as in a decode step."""
    copied: dict[str, list[int]] = {name: [] for name in CHANGES}
    spent: dict[str, list[float]] = {name: [] for name in CHANGES}
    theirs: list[float] = []
    for _ in range(ROUNDS):
        batch = BatchCache()
        batch.rows, batch.gaps = SEQUENCES, True
        batch.arrange([(_row(), 0) for _ in range(SEQUENCES)])
        _decode(batch.layers)
        for name, (joins, leaves) in CHANGES.items():
            rows = [_row() for _ in range(joins)]
            before = _addresses(batch.layers)
            started = time.perf_counter()
            batch.leave(range(leaves))
            batch.arrange([(row, 0) for row in rows])
            _decode(batch.layers)
            spent[name].append(time.perf_counter() - started)
            copied[name].append(_copied(before, batch.layers, joins))
        del batch
        theirs.append(_of_mlx_lm())
    for name in CHANGES:
        yield fact(
            f"MiB copied by a {name}, {SEQUENCES} sequences of {TOKENS} tokens",
            statistics.median(copied[name]) / 2**20,
            f"{statistics.median(spent[name]) * 1e3:.0f} ms",
        )
    mine, other = statistics.median(spent["turnover"]), statistics.median(theirs)
    yield at_most(
        "time of a turnover / mlx-lm's BatchKVCache",
        mine / other,
        1,
        f"{mine * 1e3:.0f} / {other * 1e3:.0f} ms",
    )


def _of_mlx_lm() -> float:
    """Seconds of a turnover with the steps of mlx-lm's BatchGenerator."""
    rows = [_row(KVCache) for _ in range(SEQUENCES)]
    layers = [BatchKVCache.merge([row[at] for row in rows]) for at in range(LAYERS)]
    del rows
    _decode(layers)
    joining = _row(KVCache)
    stay = mx.array(list(range(1, SEQUENCES)))
    started = time.perf_counter()
    for layer, row in zip(layers, joining, strict=True):
        layer.filter(stay)
        layer.extend(BatchKVCache.merge([row]))
    _decode(layers)
    return time.perf_counter() - started


def _row(kind: Any = LayerKV) -> RowCache:
    row = [kind() for _ in range(LAYERS)]
    for layer in row:
        layer.update_and_fetch(*(mx.random.normal((1, HEADS, TOKENS, DIM)) for _ in range(2)))
    mx.eval([layer.state for layer in row])
    return row


def _decode(layers: Sequence[Any]) -> None:
    token = mx.zeros((SEQUENCES, HEADS, 1, DIM))
    mx.eval([layer.update_and_fetch(token, token) for layer in layers])


def _addresses(layers: Sequence[Any]) -> list[int]:
    return [
        np.asarray(part).__array_interface__["data"][0]
        for layer in layers
        for part in (layer.keys, layer.values)
    ]


def _copied(before: Sequence[int], layers: Sequence[Any], joins: int) -> int:
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    after = _addresses(layers)
    return sum(
        joins * _PART if old == new else part.nbytes
        for old, new, part in zip(before, after, parts, strict=True)
    )
