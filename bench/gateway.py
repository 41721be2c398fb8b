"""The cost of the gateway: the same answers through it, and directly from its backend."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from os import environ
from pathlib import Path

import grpc
import psutil

from bench import peer
from bench.pairs import at_least_in_pairs
from bench.process import ROOT, Run, stream
from bench.report import Figure, at_most
from cli.backend_process import free_port, until_health
from common.launch import command
from wire.backend_pb2_grpc import BackendStub

WIDTHS = (1, 8)
TOKENS = 48
PAIRS = 11
SECONDS = 60.0  # for the pairs of one comparison
SLOWER = 1.03  # maximum ratio with / without the gateway
NAME = "bench"

Way = Callable[[str, int], Run]


def measure(model: Path) -> Iterator[Figure]:
    """Tokens per second, time to the first piece and processor time, at one stream and at eight.

    One backend serves both ways. If the machine's speed varies by more than the goal, processor
    time still shows the gateway's cost.
    """
    with _both(model) as (stub, port, backend, host):
        through = partial(peer.stream, port, model=NAME, temperature=0, ignore_eos=True)
        ways: dict[str, Way] = {"direct": partial(stream, stub), "through": through}
        for width in WIDTHS:

            def runs(way: str, label: str, turn: int, width: int = width) -> list[Run]:
                # Both prompts have the same number of tokens, and neither is cached.
                prompts = [f"Tell me {label} {at} of {turn} {way}." for at in range(width)]
                with ThreadPoolExecutor(width) as pool:
                    return list(pool.map(lambda prompt: ways[way](prompt, TOKENS), prompts))

            def speed(way: str, turn: int) -> float:
                answers = runs(way, "story", turn)
                return sum(run.tokens for run in answers) / max(run.seconds for run in answers)

            def promptness(way: str, turn: int) -> float:
                return 1 / max(run.first for run in runs(way, "tale", turn))

            before = _processor_seconds(host), _processor_seconds(backend)
            for name, value in (("tokens/s", speed), ("1 / time to first piece", promptness)):
                yield at_least_in_pairs(
                    f"{name} through the gateway / directly, {width} streams",
                    1 / SLOWER,
                    partial(value, "through"),
                    partial(value, "direct"),
                    pairs=PAIRS,
                    seconds=SECONDS,
                )
            after = _processor_seconds(host), _processor_seconds(backend)
            own, served = (late - early for late, early in zip(after, before, strict=True))
            name = f"processor time of the gateway / of its backend's half, {width} streams"
            yield at_most(name, own / served * 2, SLOWER - 1, f"{own:.1f} / {served / 2:.1f} s")


@contextmanager
def _both(model: Path) -> Iterator[tuple[BackendStub, int, psutil.Process, psutil.Process]]:
    """Yield the stub of a backend, the port of its gateway, and both processes."""
    control, port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "name": NAME,
            "address": f"127.0.0.1:{control}",
            "parameters": {"model": str(model)},
            "context_size": 8192,
        }
        (Path(folder) / f"{NAME}.yaml").write_text(json.dumps(config))
        commands = (
            [str(ROOT / "run.sh"), "--addr", f"127.0.0.1:{control}"],
            command("-m", "gateway", "--models-dir", folder, "--port", str(port)),
        )
        quiet = {**environ, "MLX_BACKEND_LOG": "error"}
        children = [
            subprocess.Popen(
                words, env=quiet, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
            )
            for words in commands
        ]
        try:
            until_health(children[0], control)
            peer.until_healthy(children[1], port)
            # The first request makes the gateway load the model, before anything is measured.
            peer.stream(port, "Hello", 1, model=NAME, ignore_eos=True)
            stub = BackendStub(grpc.insecure_channel(f"127.0.0.1:{control}"))
            yield stub, port, psutil.Process(children[0].pid), psutil.Process(children[1].pid)
        finally:
            for child in reversed(children):
                child.terminate()
                child.wait()


def _processor_seconds(process: psutil.Process) -> float:
    """Return processor seconds so far of a process and its children."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)
