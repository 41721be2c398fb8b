"""The cost of the gateway: the same answers through it, and directly from its backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench import peer
from bench.pairs import at_least_in_pairs
from bench.process import Run, process, stream
from bench.report import Figure, at_most
from cli.backend_process import free_port
from tests.gateway.gateway_process import GatewayProcess

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
    control = free_port()
    address = {"address": f"127.0.0.1:{control}", "parameters": {"model": str(model)}}
    with process(port=control) as (child, stub), served(**address) as (gateway, port):
        backend, host = psutil.Process(child.pid), psutil.Process(gateway.child.pid)
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
            own, backends = (late - early for late, early in zip(after, before, strict=True))
            name = f"processor time of the gateway / of its backend's half, {width} streams"
            yield at_most(name, own / backends * 2, SLOWER - 1, f"{own:.1f} / {backends / 2:.1f} s")


@contextmanager
def served(**config: Any) -> Iterator[tuple[GatewayProcess, int]]:
    """Yield a gateway with one model, which is loaded, and its port.

    config: keys of the model's file.
    """
    gateway = GatewayProcess({NAME: {"context_size": 8192, **config}})
    try:
        port = urlsplit(gateway.url).port
        assert port is not None
        peer.stream(port, "Hello", 1, model=NAME, ignore_eos=True)  # waits for the load
        yield gateway, port
    finally:
        gateway.close()


def _processor_seconds(observed: psutil.Process) -> float:
    """Return processor seconds so far of a process and its children."""
    times = [each.cpu_times() for each in (observed, *observed.children(recursive=True))]
    return sum(time.user + time.system for time in times)
