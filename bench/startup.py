"""Time from the start of the process to Health OK, against the time to import mlx_lm."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from os import environ

from bench.process import ROOT, free_port, until_health
from bench.report import Figure, at_most

ROUNDS = 10


def measure() -> Iterator[Figure]:
    """The two alternate, so that a busy machine slows both."""
    ours, imports = [], []
    _health()
    _import()
    for _ in range(ROUNDS):
        ours.append(_health())
        imports.append(_import())
    health, alone = statistics.median(ours), statistics.median(imports)
    yield at_most(
        "start to Health OK / import mlx_lm, median of 10",
        health / alone,
        1 / 3,
        f"{health * 1e3:.0f} / {alone * 1e3:.0f} ms",
    )


def _health() -> float:
    port = free_port()
    started = time.perf_counter()
    child = subprocess.Popen(
        [ROOT / "run.sh", "--addr", f"127.0.0.1:{port}"],
        env={**environ, "MLX_BACKEND_LOG": "error"},
        stdin=subprocess.DEVNULL,
    )
    try:
        until_health(child, port)
        return time.perf_counter() - started
    finally:
        child.terminate()
        child.wait()


def _import() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import mlx_lm"], check=True)
    return time.perf_counter() - started
