"""Answers with different LoRA adapters in one batch, against one batch for each adapter."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx_lm

from bench.pairs import at_least_in_pairs
from bench.process import backend
from bench.report import Figure
from tests.engine.test_row_adapters import write_choices
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

RANKS = {"first": 8, "second": 8, "third": 8}
CHOICES = (*RANKS, "")  # no adapter
ROWS = 2  # answers of each choice
TOKENS = 32
PAIRS = 7
SECONDS = 60.0  # for the pairs of one comparison


def measure(model: Path) -> Iterator[Figure]:
    """Measure with adapters of random weights for every linear layer."""
    with TemporaryDirectory() as folder:
        write_choices(Path(folder), mlx_lm.load(str(model), lazy=True)[0], 0.01, **RANKS)
        named = ", ".join(f"{name}={folder}/{name}" for name in RANKS)
        with backend(model, Options=[f"adapters:{named}"]) as stub:
            mixed, plain = CHOICES * ROWS, [""] * len(CHOICES) * ROWS
            yield at_least_in_pairs(
                f"tokens/s of {len(mixed)} answers, {len(RANKS)} adapters / each adapter apart",
                1.3,
                partial(_speed, stub, [mixed]),
                partial(_speed, stub, [[choice] * ROWS for choice in CHOICES]),
                pairs=PAIRS,
                seconds=SECONDS,
            )
            yield at_least_in_pairs(
                f"tokens/s of {len(mixed)} answers, {len(RANKS)} adapters / without adapters",
                0.5,
                partial(_speed, stub, [mixed]),
                partial(_speed, stub, [plain]),
                pairs=PAIRS,
                seconds=SECONDS,
            )


def _speed(stub: BackendStub, batches: Sequence[Sequence[str]], turn: int) -> float:
    """Return tokens per second of batches that run one after the other.

    batches: for each answer of a batch, the name of its adapter.
    """

    def ask(numbered: tuple[int, str]) -> int:
        number, adapter = numbered
        request = pb.PredictOptions(
            Prompt=f"Story {turn}, number {number}:",
            Tokens=TOKENS,
            IgnoreEOS=True,
            Metadata={"mlx.adapter": adapter} if adapter else {},
        )
        return int(stub.Predict(request).tokens)

    started, tokens = time.perf_counter(), 0
    for batch in batches:
        with ThreadPoolExecutor(len(batch)) as pool:
            tokens += sum(pool.map(ask, enumerate(batch)))
    return tokens / (time.perf_counter() - started)
