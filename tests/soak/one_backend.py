"""Soak test: sends a backend all kinds of requests for minutes, and checks that it does not grow.

The time is divided into rounds of equal work: Free, a load of the text model, its clients, a load
of the vision model, its clients. Answers are running whenever a model is unloaded. After each
round the idle process is measured. SOAK_SECONDS sets the duration; the default is 600.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.process import load, process
from bench.report import Figure, Table, at_most, fact
from tests.soak.clients import Clients, Ledger
from tests.soak.traffic import CONTEXT, Model, models
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

SECONDS = 600.0
LEAST_ROUNDS = 6
LOADS = 100
SETTLED = 30  # loads after which memory should not grow any more
# Rounds are random, so the memory that the allocator keeps differs by a few MiB.
GROWTH = 1.05
OPTIONS = ("prompt_cache_mib:8", "parallel:6")
_PARTS = ("weights", "kv_cache", "prompt_cache", "media_features")
_CALL = re.compile(r"event=call rpc=Predict\S* status=(\S+) id=(soak-\d+)\.")


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of the idle process.

    resident: bytes, including its children. active: MLX's bytes that are not in a part of Status.
    """

    resident: int
    active: int
    threads: int
    descriptors: int


def measure(text: Path, vision: Path) -> Iterator[Figure | Table]:
    seconds = float(os.environ.get("SOAK_SECONDS", SECONDS))
    with tempfile.NamedTemporaryFile() as log:
        with process({"MLX_BACKEND_LOG": "info"}, log.file) as (child, stub):
            ledger = Ledger()
            samples = _rounds(Clients(stub, ledger), stub, child.pid, models(text, vision), seconds)
            yield from _of_calls(ledger)
            yield _table(samples)
            yield from _of_samples(samples)
            yield from _loads(stub, child.pid, (text, vision))
        yield _of_log(ledger, Path(log.name).read_text(errors="replace"))


def _rounds(
    clients: Clients, stub: BackendStub, pid: int, chosen: Sequence[Model], seconds: float
) -> list[Sample]:
    samples: list[Sample] = []
    for model in chosen:
        load(stub, model.path, ContextSize=CONTEXT, Options=OPTIONS)
        clients.learn(model)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends or len(samples) < LEAST_ROUNDS:
        seed = f"round {len(samples)}"
        dice = random.Random(seed)
        with clients.overtaken(dice):
            stub.Free(pb.HealthMessage())
        clients.refused_unloaded(dice)
        load(stub, chosen[0].path, ContextSize=CONTEXT, Options=OPTIONS)
        clients.work(chosen[0], seed)
        with clients.overtaken(dice):
            load(stub, chosen[1].path, ContextSize=CONTEXT, Options=OPTIONS)
        clients.work(chosen[1], seed)
        clients.repeat(chosen[1])  # so that the same work precedes every measurement
        samples.append(_sample(stub, pid))
    return samples


def _sample(stub: BackendStub, pid: int) -> Sample:
    while True:
        status = stub.Status(pb.HealthMessage())
        parts = status.memory.breakdown
        if status.state != pb.StatusResponse.BUSY and not parts["kv_cache"]:
            break
        time.sleep(0.01)
    own = psutil.Process(pid)
    return Sample(
        sum(one.memory_info().rss for one in (own, *own.children(recursive=True))),
        parts["mlx_active"] - sum(parts[part] for part in _PARTS),
        own.num_threads(),
        own.num_fds(),
    )


def _of_calls(ledger: Ledger) -> Iterator[Figure]:
    ends: Counter[str] = Counter()
    for (_, status), calls in ledger.ends.items():
        ends[status] += calls
    shown = ", ".join(f"{calls} {status}" for status, calls in ends.most_common())
    yield fact("calls of the soak", ends.total(), shown)
    for sentence in (*ledger.wrong[:5], *ledger.differing[:5]):
        print(f"  {sentence}")
    yield at_most("calls that ended wrongly", len(ledger.wrong), 0)
    compared = f"of {ledger.compared}"
    yield at_most(
        "answers that differ from the same request alone", len(ledger.differing), 0, compared
    )


def _table(samples: Sequence[Sample]) -> Table:
    return Table(
        "The idle process after each round:",
        ("round", "resident MiB", "unnamed KiB of MLX", "threads", "descriptors"),
        [
            (
                str(at),
                f"{sample.resident / 2**20:.1f}",
                f"{sample.active / 2**10:.1f}",
                str(sample.threads),
                str(sample.descriptors),
            )
            for at, sample in enumerate(samples)
        ],
    )


def _of_samples(samples: Sequence[Sample]) -> Iterator[Figure]:
    """Medians of the last third of the rounds against the first third, without the first round."""
    third = max(len(samples) // 3, 2)
    first, last = samples[1 : third + 1], samples[-third:]

    def medians(of: Callable[[Sample], int]) -> tuple[float, float]:
        return statistics.median(map(of, first)), statistics.median(map(of, last))

    before, after = medians(lambda sample: sample.resident)
    shown = f"{before / 2**20:.1f} to {after / 2**20:.1f} MiB in {len(samples)} rounds"
    yield at_most("resident memory, last third / first", after / before, GROWTH, shown)
    before, after = medians(lambda sample: sample.active)
    yield at_most("MLX's bytes that Status does not account for, growth", after - before, 2**16)
    for name, of in (
        ("threads", lambda sample: sample.threads),
        ("descriptors", lambda sample: sample.descriptors),
    ):
        before, after = medians(of)
        yield at_most(f"{name}, growth", after - before, 0, f"{before:g} to {after:g}")


def _loads(stub: BackendStub, pid: int, paths: Sequence[Path]) -> Iterator[Figure]:
    samples: list[Sample] = []
    for at in range(LOADS):
        load(stub, paths[at % len(paths)], ContextSize=CONTEXT)
        stub.Predict(pb.PredictOptions(Prompt="Once", Tokens=2))
        stub.Free(pb.HealthMessage())
        samples.append(_sample(stub, pid))
    settled, end = samples[SETTLED], samples[-1]
    grown = end.resident / settled.resident
    shown = f"{settled.resident / 2**20:.1f} to {end.resident / 2**20:.1f} MiB"
    yield at_most(f"resident memory, {LOADS} loads / {SETTLED}", grown, 1.02, shown)
    yield at_most("MLX's bytes without a model, growth", end.active - settled.active, 0)
    yield at_most("threads, growth", end.threads - settled.threads, 0)
    yield at_most("descriptors, growth", end.descriptors - settled.descriptors, 0)


def _of_log(ledger: Ledger, log: str) -> Figure:
    """The answers that do not have exactly one final line in the backend's log."""
    ends = Counter(_CALL.findall(log))
    of_label = Counter(label for _, label in ends.elements())
    odd = [label for label, times in of_label.items() if times > 1]
    odd += [label for label in ledger.answered if not ends["OK", label]]
    shown = f"of {len(of_label)}"
    return at_most("answers without exactly one end in the backend's log", len(odd), 0, shown)
