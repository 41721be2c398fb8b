"""The cost of sampling a token, against mlx-lm's samplers on the same logits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from backend.engine.device import detect, prepare
from backend.engine.request import Sampling
from backend.engine.sampling.penalties import Past
from backend.engine.sampling.sampler import BatchSampler
from bench.report import Figure, at_most

VOCABULARY = 151_936
ROUNDS = 9
CASES = {
    "LocalAI's defaults": Sampling(temperature=0.9, top_k=40, top_p=0.95),
    "top_p alone": Sampling(temperature=0.9, top_p=0.95),
    "min_p alone": Sampling(temperature=0.9, min_p=0.05),
    "temperature alone": Sampling(temperature=0.9),
}


def measure() -> Iterator[Figure]:
    prepare(detect())
    for name, row in CASES.items():
        for rows in (1, 8):
            ours, theirs = _milliseconds_per_row(row, rows)
            yield at_most(
                f"ms to choose a token, {name}, batch of {rows} / mlx-lm",
                ours / theirs,
                1,
                f"{ours:.2f} / {theirs:.2f}",
            )


def _milliseconds_per_row(row: Sampling, rows: int) -> tuple[float, float]:
    """Medians of alternating rounds: ours, and mlx-lm's."""
    from mlx_lm.sample_utils import make_sampler

    logits, fed = _logits(rows), mx.zeros(rows, dtype=mx.uint32)
    sampler = BatchSampler([row] * rows, [Past((), 1, 2)] * rows, VOCABULARY)
    reference = make_sampler(row.temperature, row.top_p, row.min_p, top_k=row.top_k)

    def choose(step: int) -> mx.array:
        return sampler(logits, fed, [step] * rows)

    def choose_bare(_: int) -> mx.array:
        chosen: mx.array = reference(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        return chosen

    times: list[list[float]] = [[], []]
    for step in range(ROUNDS):
        for own, way in zip(times, (choose, choose_bare), strict=True):
            started = time.perf_counter()
            mx.eval(way(step))
            own.append((time.perf_counter() - started) * 1000 / rows)
    ours, theirs = map(statistics.median, times)
    return ours, theirs


def _logits(rows: int) -> mx.array:
    """A few likely tokens and a long tail, like a language model's logits."""
    rng = np.random.default_rng(rows)
    logits = rng.normal(0, 2.5, (rows, VOCABULARY)).astype(np.float32)
    logits[:, rng.integers(0, VOCABULARY, 60)] += np.linspace(6, 14, 60, dtype=np.float32)
    return mx.array(logits)
