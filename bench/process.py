"""A backend process to measure, and the calls that the measurements share."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from os import environ
from pathlib import Path
from typing import IO, Any

import grpc
from grpc.experimental import ChannelOptions

from common.launch import command
from common.process_end import end_of
from gateway.supervisor.warden import backend_environ
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
                raise RuntimeError(end_of("the backend", child.returncode)) from None
            time.sleep(0.002)
    channel = grpc.insecure_channel(
        f"127.0.0.1:{port}",
        options=[
            ("grpc.use_local_subchannel_pool", 1),
            # Otherwise the client needs more time per token of a small model than the backend.
            (ChannelOptions.SingleThreadedUnaryStream, 1),
        ],
    )
    stub = backend_pb2_grpc.BackendStub(channel)
    if stub.Health(pb.HealthMessage(), timeout=10).message != b"OK":
        raise RuntimeError("Health is not OK")
    return stub


def environment_of(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without the changes of its start script, plus `extra`."""
    found = backend_environ(environ, {})
    found.pop("OPENBLAS_NUM_THREADS", None)
    return found | dict(extra)


@contextmanager
def process(
    environment: Mapping[str, str] | None = None,
    stderr: IO[bytes] | None = None,
    port: int | None = None,
    module: str = "backend",
) -> Iterator[tuple[subprocess.Popen[bytes], backend_pb2_grpc.BackendStub]]:
    """Start a backend, on a free port without `port`; yields its process and a stub."""
    port = port or free_port()
    if environ.get("ORDER"):
        module = "bench.measured_backend"
    child = subprocess.Popen(
        command("-m", module, "--addr", f"127.0.0.1:{port}"),
        env=environment_of({"MLX_BACKEND_LOG": "error", **(environment or {})}),
        stdin=subprocess.DEVNULL,
        stderr=stderr,
    )
    try:
        yield child, until_health(child, port)
    finally:
        child.terminate()
        child.wait()


def load(stub: backend_pb2_grpc.BackendStub, model: Path, **options: Any) -> None:
    options.setdefault("ContextSize", 8192)
    stub.LoadModel(pb.ModelOptions(Model=model.name, ModelFile=str(model), **options))


@contextmanager
def backend(
    model: Path | None = None, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[backend_pb2_grpc.BackendStub]:
    """A backend with a model loaded if one is given."""
    with process(environment) as (_, stub):
        if model is not None:
            load(stub, model, **options)
        yield stub


@dataclass
class Run:
    """One streamed answer: arrival of each piece, in seconds since the call, and the totals.

    begun: set when the first piece has arrived or the call is over. leave: set it to cancel.
    """

    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    begun: threading.Event = field(default_factory=threading.Event)
    leave: threading.Event = field(default_factory=threading.Event)

    @property
    def first(self) -> float:
        return self.arrivals[0]

    def piece(self) -> None:
        self.arrivals.append(time.perf_counter() - self.started)
        if len(self.arrivals) == 1:
            self.begun.set()

    def finish(self) -> None:
        self.seconds = time.perf_counter() - self.started
        self.begun.set()

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest gap that ended between these times of `perf_counter`, in seconds."""
        times = [self.started + arrival for arrival in self.arrivals]
        return max(later - earlier for earlier, later in pairwise(times) if begin < later < end)


def stream(
    stub: backend_pb2_grpc.BackendStub,
    prompt: str,
    tokens: int,
    run: Run | None = None,
    images: Sequence[str] = (),
    *,
    chat: bool = True,
) -> Run:
    """Generate exactly `tokens` tokens, greedily.

    images: in base64. chat: whether the prompt is a message, and not what the model reads.
    """
    run = run or Run()
    request = pb.PredictOptions(
        Messages=[pb.Message(role="user", content=prompt)] if chat else [],
        Prompt="" if chat else prompt,
        UseTokenizerTemplate=chat,
        Tokens=tokens,
        IgnoreEOS=True,
        Images=images,
    )
    call = stub.PredictStream(request)
    try:
        for reply in call:
            if reply.message:
                run.piece()
            run.tokens, run.prompt_tokens = reply.tokens, reply.prompt_tokens
            if run.leave.is_set():
                call.cancel()
                break
    finally:
        run.finish()
    return run


def together(ask: Callable[[str, int], Run], prompts: Sequence[str], tokens: int) -> float:
    """Tokens per second of concurrent calls, from the first call to the last token."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        runs = list(pool.map(lambda prompt: ask(prompt, tokens), prompts))
    return sum(run.tokens for run in runs) / (time.perf_counter() - started)


def words(count: int) -> str:
    """A text of `count` different words."""
    return " ".join(f"item{number}" for number in range(count))
