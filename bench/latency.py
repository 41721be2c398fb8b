"""The latency of Health and Status while requests are running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from bench.process import Run, backend, p99, probing, stream, together, words
from bench.report import Figure, at_most
from wire.backend_pb2_grpc import BackendStub

STREAMS = 8
LONG_WORDS = 1000  # about 4,000 tokens


def measure(model: Path) -> Iterator[Figure]:
    with backend(model) as stub:

        def ask(prompt: str, tokens: int) -> Run:
            return stream(stub, prompt, tokens)

        stories = [f"Tell me story {number}." for number in range(STREAMS)]
        yield from _probes(stub, "8 streams", lambda: together(ask, stories, 60))
        yield from _probes(stub, "4k prefill", lambda: ask(words(LONG_WORDS), 1))


def _probes(stub: BackendStub, name: str, work: Callable[[], object]) -> Iterator[Figure]:
    """Latencies of Health and Status, called back to back while the work runs."""
    with probing(stub.Health, 0.01) as health, probing(stub.Status, 0.01) as status:
        work()
    for rpc, seen in (("Health", health), ("Status", status)):
        yield at_most(f"{rpc} p99 in ms during {name}", p99(seen), 100, f"{len(seen)} calls")
