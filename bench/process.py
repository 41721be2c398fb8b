"""The calls of a backend that the measurements share."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from os import environ
from pathlib import Path
from typing import IO, Any

from cli import backend_process
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

ROOT = Path(__file__).parents[1]
_WORDS = (
    "the of and to in is that for it as was with be by on not he this are or his from at which"
    " but have an had they you were their one all we can her has there been if more when will"
).split()


def process(
    environment: Mapping[str, str] | None = None,
    stderr: IO[bytes] | None = None,
    port: int | None = None,
    module: str = "backend",
) -> AbstractContextManager[tuple[subprocess.Popen[bytes], BackendStub]]:
    """Return a backend as `cli.backend_process` starts it; with ORDER, in the order of a GPU."""
    if environ.get("ORDER"):
        module = "bench.measured_backend"
    return backend_process.process(environment, stderr, port, module)


def load(stub: BackendStub, model: Path, **options: Any) -> None:
    options.setdefault("ContextSize", 8192)
    stub.LoadModel(pb.ModelOptions(Model=model.name, ModelFile=str(model), **options))


@contextmanager
def backend(model: Path, **options: Any) -> Iterator[BackendStub]:
    """Yield a backend with a model loaded."""
    with process() as (_, stub):
        load(stub, model, **options)
        yield stub


@dataclass
class Run:
    """One streamed answer: arrival of each piece, in seconds since the call, and the totals.

    begun: set when the first piece has arrived or the call is over.
    leave: set it to cancel.
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
        """Seconds to the first text, or to the end of an answer without text."""
        return self.arrivals[0] if self.arrivals else self.seconds

    def piece(self) -> None:
        self.arrivals.append(time.perf_counter() - self.started)
        self.begun.set()

    def finish(self) -> None:
        self.seconds = time.perf_counter() - self.started
        self.begun.set()

    def longest_gap(self, begin: float, end: float) -> float:
        """Return the longest gap that ended between these times of `perf_counter`, in seconds."""
        times = [self.started + arrival for arrival in self.arrivals]
        return max(later - earlier for earlier, later in pairwise(times) if begin < later < end)


def stream(
    stub: BackendStub, prompt: str, tokens: int, run: Run | None = None, *, chat: bool = True
) -> Run:
    """Generate exactly `tokens` tokens, greedily.

    chat: whether the prompt is a message, and not what the model reads.
    """
    run = run or Run()
    request = pb.PredictOptions(
        Messages=[pb.Message(role="user", content=prompt)] if chat else [],
        Prompt="" if chat else prompt,
        UseTokenizerTemplate=chat,
        Tokens=tokens,
        IgnoreEOS=True,
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
    """Return tokens per second of concurrent calls, from the first call to the last token."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        runs = list(pool.map(lambda prompt: ask(prompt, tokens), prompts))
    return sum(run.tokens for run in runs) / (time.perf_counter() - started)


@contextmanager
def probing(call: Callable[..., object], pause: float) -> Iterator[list[float]]:
    """Call Health or Status again and again on a thread; yields the seconds of each call.

    pause: seconds between two calls.
    """
    seen: list[float] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(pause):
            started = time.perf_counter()
            call(pb.HealthMessage(), timeout=30)
            seen.append(time.perf_counter() - started)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield seen
    finally:
        over.set()
        asking.join()


def p99(seconds: Sequence[float]) -> float:
    """Return the 99th percentile, in milliseconds."""
    return sorted(seconds)[int(len(seconds) * 0.99)] * 1e3


def words(count: int) -> str:
    """Return a text of `count` different words."""
    return " ".join(f"item{number}" for number in range(count))


def text(seed: str, count: int) -> str:
    """Return `count` short words in a pseudo-random order."""
    return " ".join(random.Random(seed).choices(_WORDS, k=count))
