"""Speculative decoding: tokens per second with and without it, on repetitive and on free text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from bench.process import Run, backend, stream
from bench.report import Figure, at_least, fact
from wire.backend_pb2_grpc import BackendStub

TOKENS = 96
ROUNDS = 3

CODE = """class Queue:
    def __init__(self, size):
        self.items = []
        self.size = size

    def push(self, item):
        if len(self.items) >= self.size:
            raise OverflowError("the queue is full")
        self.items.append(item)
"""
REPETITIVE = f"Write this code again, with the class named Line instead of Queue:\n{CODE}"
FREE = "Tell me a story about a lighthouse keeper."

TINY_REPETITIVE = "Count to 60."
TINY_FREE = "Tell me a long story about a fox."


def lookup(model: Path) -> Iterator[Figure]:
    """Prompt lookup, on a model that is large enough for its steps to take time."""
    with backend(model) as plain, backend(model, Options=["prompt_lookup:true"]) as drafting:
        name = "tokens/s with prompt lookup / without"
        ratio, detail = _ratio(drafting, plain, REPETITIVE)
        yield at_least(f"{name}, code written again", ratio, 1.3, detail)
        ratio, detail = _ratio(drafting, plain, FREE)
        yield at_least(f"{name}, free text", ratio, 0.95, detail)


def draft_model(model: Path, draft: Path) -> Iterator[Figure]:
    """A draft model whose step takes half as long as its model's, so the possible gain is small."""
    with backend(model) as plain, backend(model, DraftModel=str(draft)) as drafting:
        for kind, prompt in (("counting", TINY_REPETITIVE), ("a story", TINY_FREE)):
            ratio, detail = _ratio(drafting, plain, prompt)
            yield fact(f"tokens/s with the tiny draft model / without, {kind}", ratio, detail)


def _ratio(drafting: BackendStub, plain: BackendStub, prompt: str) -> tuple[float, str]:
    """Rounds alternate; the first of each warms up and stores the prompt."""
    speeds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for stub, found in zip((drafting, plain), speeds, strict=True):
            found.append(_speed(stream(stub, prompt, TOKENS)))
    ours, theirs = (statistics.median(found[1:]) for found in speeds)
    return ours / theirs, f"{ours:.1f} / {theirs:.1f}"


def _speed(run: Run) -> float:
    """Tokens per second after the first."""
    return (run.tokens - 1) / (run.seconds - run.first)
