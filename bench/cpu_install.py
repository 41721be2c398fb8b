"""The speed-up by OpenBLAS and by the cast to float32, on a Linux CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.process import backend, stream, together
from bench.report import Figure, at_least

STREAMS = 4


def measure(model: Path) -> Iterator[Figure]:
    """Tokens per second of an installation with OpenBLAS and the cast, relative to one without."""
    prompts = [f"Tell me story {number}." for number in range(STREAMS)]
    speeds: list[float] = []
    plain = {"MLX_BACKEND_OPENBLAS": "0", "MLX_BACKEND_CPU_CAST": "0"}
    for environment in ({}, plain):
        with backend(model, environment) as stub:
            together(partial(stream, stub), prompts, 2)
            speeds.append(together(partial(stream, stub), prompts, 16))
    ours, without = speeds
    yield at_least(
        f"tokens/s at {STREAMS} streams, with / without OpenBLAS and cast",
        ours / without,
        4,
        f"{ours:.1f} / {without:.2f}",
    )
