"""Overload: how many requests a backend still serves, and how fast it refuses the others.

Requests arrive at a constant rate, TIMES the backend's capacity, without waiting for answers.
BENCH_SECONDS sets the duration; the default is 60.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from grpc import StatusCode

from bench.light_client import LightClient
from bench.process import load, p99, probing, process
from bench.report import Figure, at_least, at_most
from cli.backend_process import free_port
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

TIMES = 20
SECONDS = 60.0
PARALLEL = 8
TOKENS = 16
OPTIONS = (f"parallel:{PARALLEL}", f"max_queue:{PARALLEL}")
_PROBE_SECONDS = 0.1
_GRACE_SECONDS = 1.0  # maximum wait at the end for requests that may still be refused
_numbers = itertools.count()


@dataclass
class Ends:
    """How calls ended: end times of served calls, seconds of refusals, status codes of others."""

    served: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)

    def note(self, seconds: float, code: int) -> None:
        if code == StatusCode.OK.value[0]:
            self.served.append(time.perf_counter())
        elif code == StatusCode.RESOURCE_EXHAUSTED.value[0]:
            self.refused.append(seconds)
        else:
            self.others[f"status {code}"] += 1

    def rate(self, begin: float) -> float:
        """Return served requests per second since a time."""
        return sum(begin < at for at in self.served) / (time.perf_counter() - begin)


def measure(model: Path) -> Iterator[Figure]:
    seconds = float(os.environ.get("BENCH_SECONDS", SECONDS))
    port = free_port()
    with process(port=port) as (_, stub):
        load(stub, model, Options=OPTIONS)
        alone = min(_one(stub) for _ in range(3))
        capacity = _capacity(stub, seconds / 2)
        with probing(stub.Health, _PROBE_SECONDS) as idle:
            time.sleep(seconds / 4)
        ends, began = Ends(), time.perf_counter()
        with probing(stub.Health, _PROBE_SECONDS) as probes:
            sent = _flood(port, capacity * TIMES, seconds, ends)
            goodput = ends.rate(began + seconds / 10)
        after = _one(stub)
    came = sent / capacity / seconds
    yield at_least("requests that came / capacity", came, TIMES * 0.9, f"{capacity:.3g} a second")
    yield at_least("served under overload / capacity", goodput / capacity, 0.9)
    yield at_most("refusals, p99 in ms", p99(ends.refused), 50, f"{len(ends.refused)} refusals")
    ratio = f"{p99(probes) / p99(idle):.3g} times idle"
    yield at_most("Health p99 in ms under overload", p99(probes), 100, ratio)
    yield at_most("calls that ended otherwise", ends.others.total(), 0, ", ".join(ends.others))
    yield at_most("seconds that an answer takes longer afterwards", after - alone, 1)


def _one(stub: BackendStub) -> float:
    """Return the seconds of one request."""
    started = time.perf_counter()
    stub.Predict(_request(), timeout=60)
    return time.perf_counter() - started


def _capacity(stub: BackendStub, seconds: float) -> float:
    """Return requests per second when all slots are always used."""
    ends, began = Ends(), time.perf_counter()

    def ask(_: int) -> None:
        while time.perf_counter() < began + seconds:
            ends.note(_one(stub), StatusCode.OK.value[0])

    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(ask, range(PARALLEL)))
    return ends.rate(began + seconds / 10)


def _flood(port: int, rate: float, seconds: float, ends: Ends) -> int:
    """Send `rate` requests per second on schedule; returns how many were sent.

    Those that are running or waiting at the end are cancelled.
    """
    client = LightClient(port, "/backend.Backend/Predict", ends.note)
    began = time.perf_counter()
    sent = 0
    try:
        for sent in range(1, int(rate * seconds) + 1):
            client.read_until(began + sent / rate)
            client.call(_request().SerializeToString())
        last = time.perf_counter() + _GRACE_SECONDS
        while (lost := len(client.unanswered) - 2 * PARALLEL) > 0 and time.perf_counter() < last:
            client.read_until(time.perf_counter() + _GRACE_SECONDS / 100)
    finally:
        client.close()
    if lost > 0:
        ends.others["no answer"] += lost
    return sent


def _request() -> pb.PredictOptions:
    """Return a request with a new prompt, so that nothing is cached."""
    return pb.PredictOptions(
        Messages=[pb.Message(role="user", content=f"Tell me story {next(_numbers)}.")],
        UseTokenizerTemplate=True,
        Tokens=TOKENS,
        IgnoreEOS=True,
    )
