"""The latency of Health and Status while requests are running."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.process import backend, stream, words
from bench.report import Figure, at_most
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

STREAMS = 8
LONG_WORDS = 1000  # about 4,000 tokens


def measure(model: Path) -> Iterator[Figure]:
    with backend(model) as stub:
        yield from _probes(stub, "8 streams", lambda: _many(stub))
        yield from _probes(stub, "4k prefill", lambda: stream(stub, words(LONG_WORDS), 1))


def _many(stub: BackendStub) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(lambda n: stream(stub, f"Tell me story {n}.", 60), range(STREAMS)))


def _probes(stub: BackendStub, name: str, work: object) -> Iterator[Figure]:
    """Latencies of Health and Status, called back to back while the work runs."""
    assert callable(work)
    worker = threading.Thread(target=work)
    health: list[float] = []
    status: list[float] = []
    worker.start()
    while worker.is_alive():
        for call, seen in ((stub.Health, health), (stub.Status, status)):
            started = time.perf_counter()
            call(pb.HealthMessage(), timeout=30)
            seen.append(time.perf_counter() - started)
        time.sleep(0.01)
    for rpc, seen in (("Health", health), ("Status", status)):
        p99 = sorted(seen)[int(len(seen) * 0.99)]
        yield at_most(f"{rpc} p99 in ms during {name}", p99 * 1e3, 100, f"{len(seen)} calls")
