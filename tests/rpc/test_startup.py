"""How soon a host gets its first Health, measured against what MLX alone takes to import."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import grpc

from tests.rpc.process import ROOT, WAIT, Process
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

ROUNDS = 5


def seconds_to_health() -> float:
    started = time.perf_counter()
    process = Process("--addr=127.0.0.1:0")
    try:
        with grpc.insecure_channel(f"127.0.0.1:{process.port()}") as channel:
            reply = BackendStub(channel).Health(pb.HealthMessage(), timeout=WAIT)
        elapsed = time.perf_counter() - started
        assert reply.message == b"OK"
    finally:
        process.close()
    return elapsed


def seconds_to_import() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import mlx_lm"], cwd=ROOT, check=True)
    return time.perf_counter() - started


def test_health_comes_within_a_third_of_the_import_of_mlx_lm() -> None:
    seconds_to_health(), seconds_to_import()  # both with their .pyc files written
    rounds = [(seconds_to_health(), seconds_to_import()) for _ in range(ROUNDS)]
    health, imported = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"health {health:.2f} s, import mlx_lm {imported:.2f} s: {health / imported:.0%}")
    assert health <= imported / 3
