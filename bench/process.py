"""A backend process to measure, and the calls that the measurements share."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import environ
from pathlib import Path
from typing import Any

import grpc

from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until_health(child: subprocess.Popen[bytes], port: int) -> backend_pb2_grpc.BackendStub:
    """Wait for the port, then for Health. Raises RuntimeError if the child died."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            if child.poll() is not None:
                raise RuntimeError(f"the backend ended with {child.returncode}") from None
            time.sleep(0.002)
    channel = grpc.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
    )
    stub = backend_pb2_grpc.BackendStub(channel)
    if stub.Health(pb.HealthMessage(), timeout=10).message != b"OK":
        raise RuntimeError("Health is not OK")
    return stub


@contextmanager
def backend(
    model: Path | None = None, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[backend_pb2_grpc.BackendStub]:
    """A backend through run.sh, with a model loaded if one is given."""
    port = free_port()
    child = subprocess.Popen(
        [ROOT / "run.sh", "--addr", f"127.0.0.1:{port}"],
        env={**environ, "MLX_BACKEND_LOG": "error", **(environment or {})},
        stdin=subprocess.DEVNULL,
    )
    try:
        stub = until_health(child, port)
        if model is not None:
            options.setdefault("ContextSize", 8192)
            stub.LoadModel(pb.ModelOptions(Model=model.name, ModelFile=str(model), **options))
        yield stub
    finally:
        child.terminate()
        child.wait()


@dataclass
class Run:
    """One streamed answer: when each piece came, in seconds from the call, and the totals."""

    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0

    @property
    def first(self) -> float:
        return self.arrivals[0]

    @property
    def longest_gap(self) -> float:
        return max(
            (
                later - earlier
                for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)
            ),
            default=0.0,
        )


def stream(
    stub: backend_pb2_grpc.BackendStub, prompt: str, tokens: int, images: Sequence[str] = ()
) -> Run:
    """Generate exactly `tokens` tokens, greedily. images: in base64."""
    run = Run()
    started = time.perf_counter()
    request = pb.PredictOptions(
        Messages=[pb.Message(role="user", content=prompt)],
        UseTokenizerTemplate=True,
        Tokens=tokens,
        IgnoreEOS=True,
        Images=images,
    )
    for reply in stub.PredictStream(request):
        if reply.message:
            run.arrivals.append(time.perf_counter() - started)
        run.tokens, run.prompt_tokens = reply.tokens, reply.prompt_tokens
    run.seconds = time.perf_counter() - started
    return run


def words(count: int) -> str:
    """A text of so many different words, so that no cache has seen it."""
    return " ".join(f"item{number}" for number in range(count))
