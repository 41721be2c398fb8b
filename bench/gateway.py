"""The cost of the gateway: the same answers through it and directly from its backend, in one run.

One backend serves both, and rounds alternate, so the gateway is the only difference.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from os import environ
from pathlib import Path

import grpc
import psutil

from bench.process import ROOT, Run, stream
from bench.report import Figure, at_least, at_most
from cli.backend_process import free_port, until_health
from common.process_end import end_of
from wire import backend_pb2_grpc

WIDTHS = (1, 8)
TOKENS = 48
PAIRS = 11
SLOWER = 1.03  # maximum ratio with / without the gateway
NAME = "bench"
_JSON = {"content-type": "application/json"}

Way = Callable[[str], Run]


@dataclass(frozen=True)
class Round:
    """Concurrent answers: tokens per second in all, and seconds to the first piece."""

    speed: float
    first: float


def measure(model: Path) -> Iterator[Figure]:
    """Tokens per second and time to the first piece, at one stream and at eight.

    Each pair of rounds, one with and one without the gateway, gives a ratio, and the figure is the
    median: if the machine's speed drifts, it changes both rounds of a pair. The order alternates.
    If the speed varies by more than the goal, processor time still shows the gateway's cost.
    """
    with _both(model) as (stub, port, backend, host):

        def direct(prompt: str) -> Run:
            return stream(stub, prompt, TOKENS)

        def through(prompt: str) -> Run:
            return _over_http(port, prompt, TOKENS)

        for way in (direct, through):
            way("Tell me a story.")
        for width in WIDTHS:
            pairs: list[tuple[Round, Round]] = []
            spent = {backend: 0.0, host: 0.0}
            for turn in range(PAIRS):
                rounds: dict[Way, Round] = {}
                for way in (direct, through) if turn % 2 else (through, direct):
                    # Both prompts have the same number of tokens, and neither is cached.
                    name = f"{width} {turn} {'straight' if way is direct else 'through'}"
                    before = {process: _processor_seconds(process) for process in spent}
                    rounds[way] = _together(way, width, name)
                    if way is through:
                        for process, start in before.items():
                            spent[process] += _processor_seconds(process) - start
                pairs.append((rounds[direct], rounds[through]))
            speed = statistics.median(mine.speed / theirs.speed for theirs, mine in pairs)
            first = statistics.median(mine.first / theirs.first for theirs, mine in pairs)
            firsts = [(1000 * mine.first, 1000 * theirs.first) for theirs, mine in pairs]
            yield at_least(
                f"tokens/s through the gateway / directly, {width} streams",
                speed,
                1 / SLOWER,
                _medians([(mine.speed, theirs.speed) for theirs, mine in pairs], ""),
            )
            yield at_most(
                f"time to first piece through it / directly, {width} streams",
                first,
                SLOWER,
                _medians(firsts, " ms"),
            )
            yield at_most(
                f"processor time of the gateway / of its backend, {width} streams",
                spent[host] / spent[backend],
                SLOWER - 1,
                f"{spent[host]:.1f} / {spent[backend]:.1f} s",
            )
        for path in ("chat/completions", "messages", "responses"):
            pause, usual = _pauses(port, path)
            yield at_most(
                f"slowest /health during 10 MiB to /{path}, s", pause, 0.1, f"usual {usual:.3f} s"
            )


def _pauses(port: int, path: str) -> tuple[float, float]:
    """Seconds of the slowest /health while long messages are sent, and without them.

    The backend refuses the messages as too long; what the gateway does before that is normal work.
    """
    text = 'if (x[1]) { y = "a\\n"; }\n' * ((10 << 20) // 27)
    asked = {"input": text} if path == "responses" else {"messages": _messages(text)}
    body = json.dumps({"model": NAME, "max_tokens": 1, **asked})

    def send(content: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for _ in range(5):
            connection.request("POST", f"/v1/{path}", content, _JSON)
            connection.getresponse().read()
        connection.close()

    def slowest(content: str) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        found = 0.0
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send, content)
            while not sending.done():
                started = time.perf_counter()
                connection.request("GET", "/health")
                connection.getresponse().read()
                found = max(found, time.perf_counter() - started)
        sending.result()
        return found

    return slowest(body), slowest(body[:100])


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@contextmanager
def _both(
    model: Path,
) -> Iterator[tuple[backend_pb2_grpc.BackendStub, int, psutil.Process, psutil.Process]]:
    """A backend and its gateway: the backend's stub, the gateway's port, and both processes."""
    address, port = f"127.0.0.1:{free_port()}", free_port()
    quiet = {**environ, "MLX_BACKEND_LOG": "error"}
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "name": NAME,
            "address": address,
            "parameters": {"model": str(model)},
            "context_size": 8192,
        }
        (Path(folder) / f"{NAME}.yaml").write_text(json.dumps(config))
        python = str(ROOT / "scripts" / "python")
        commands = (
            [str(ROOT / "run.sh"), "--addr", address],
            [python, "-m", "gateway", "--models-dir", folder, "--port", str(port)],
        )
        children = [
            subprocess.Popen(
                command, env=quiet, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for command in commands
        ]
        try:
            until_health(children[0], int(address.rpartition(":")[2]))
            _until_open(children[1], port)
            channel = grpc.insecure_channel(address)
            stub = backend_pb2_grpc.BackendStub(channel)
            yield stub, port, psutil.Process(children[0].pid), psutil.Process(children[1].pid)
        finally:
            for child in reversed(children):
                child.terminate()
                child.wait()


def _until_open(child: subprocess.Popen[bytes], port: int) -> None:
    while child.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/health")
            connection.getresponse().read()
            # The first request makes the gateway load the model, before anything is measured.
            _over_http(port, "Hello", 1)
            return
        except ConnectionError:
            time.sleep(0.05)
    raise RuntimeError(end_of("the gateway", child.returncode))


def _over_http(port: int, prompt: str, tokens: int) -> Run:
    """Generate exactly `tokens` tokens, greedily, as `bench.process.stream` does directly."""
    run = Run()
    body = {
        "model": NAME,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "messages": _messages(prompt),
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    started = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), _JSON)
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"the gateway answered {answer.status}: {answer.read(500)!r}")
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if any(choice["delta"].get("content") for choice in event["choices"]):
            run.arrivals.append(time.perf_counter() - started)
        if usage := event.get("usage"):
            run.tokens, run.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    run.seconds = time.perf_counter() - started
    connection.close()
    return run


def _together(way: Way, width: int, name: str) -> Round:
    """Run `width` concurrent answers, timed from the first start to the last end."""
    prompts = [f"Tell me story {place} of {name}." for place in range(width)]
    with ThreadPoolExecutor(width) as pool:
        started = time.perf_counter()
        runs = list(pool.map(way, prompts))
        seconds = time.perf_counter() - started
    return Round(
        sum(run.tokens for run in runs) / seconds, statistics.median(run.first for run in runs)
    )


def _processor_seconds(process: psutil.Process) -> float:
    """Processor seconds so far of a process and its children."""
    family = [process, *process.children(recursive=True)]
    times = [one.cpu_times() for one in family]
    return sum(time.user + time.system for time in times)


def _medians(values: list[tuple[float, float]], unit: str) -> str:
    mine, theirs = (statistics.median(side) for side in zip(*values, strict=True))
    return f"{mine:.1f} / {theirs:.1f}{unit}"
