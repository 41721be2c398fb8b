"""Tokens per second through the wire, against mlx-lm's bare loops in the same run."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.process import ROOT, backend, stream
from bench.report import Figure, at_least, fact
from wire.backend_pb2_grpc import BackendStub

WIDTHS = (1, 4, 8)
TOKENS = 64
ROUNDS = 3


def measure(model: Path) -> Iterator[Figure]:
    """Rounds of ours and of the bare loop alternate."""
    with backend(model) as stub:
        _together(stub, 2, 8)
        for width in WIDTHS:
            ours, bare = [], []
            for _ in range(ROUNDS):
                ours.append(_together(stub, width, TOKENS))
                bare.append(_bare(model, width))
            mine, theirs = statistics.median(ours), statistics.median(bare)
            yield at_least(
                f"tokens/s at {width} streams / mlx-lm's bare BatchGenerator",
                mine / theirs,
                0.9,
                f"{mine:.1f} / {theirs:.1f}",
            )


def cpu_install(model: Path) -> Iterator[Figure]:
    """On Linux CPU: the install's OpenBLAS and float32 cast against the same code without."""
    speeds: dict[str, float] = {}
    plain = {"MLX_BACKEND_OPENBLAS": "0", "MLX_BACKEND_CPU_CAST": "0"}
    for name, environment in (("ours", {}), ("plain", plain)):
        with backend(model, environment) as stub:
            _together(stub, 4, 2)
            speeds[name] = _together(stub, 4, 16)
    yield at_least(
        "tokens/s at 4 streams, with / without OpenBLAS and cast",
        speeds["ours"] / speeds["plain"],
        4,
        f"{speeds['ours']:.1f} / {speeds['plain']:.2f}",
    )


def host_overhead(model: Path) -> Iterator[Figure]:
    """With a model of next to no compute, what is left is the host's own work."""
    with backend(model) as stub:
        _together(stub, 2, 8)
        for width in WIDTHS:
            yield fact(
                f"tokens/s of the tiny model at {width} streams",
                statistics.median(_together(stub, width, 200) for _ in range(ROUNDS)),
            )


def _together(stub: BackendStub, width: int, tokens: int) -> float:
    """Tokens per second from the first call to the last token."""
    started = time.perf_counter()
    with ThreadPoolExecutor(width) as pool:
        runs = list(pool.map(lambda n: stream(stub, f"Tell me story {n}.", tokens), range(width)))
    return sum(run.tokens for run in runs) / (time.perf_counter() - started)


def _bare(model: Path, width: int) -> float:
    """The bare loop in a process of its own, with the same libraries preloaded."""
    output = subprocess.run(
        [ROOT / "scripts/python", "-m", "bench.bare", str(model), str(width), str(TOKENS)],
        check=True,
        capture_output=True,
    ).stdout
    return float(json.loads(output))
