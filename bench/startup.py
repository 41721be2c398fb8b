"""The start of a process, and the load of a model, against mlx-lm on the same machine."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from os import environ
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from bench.pairs import in_turn
from bench.process import ROOT, load, process, stream
from bench.report import Figure, at_most
from cli import default_model
from cli.backend_process import free_port, until_health
from common.launch import command
from wire import backend_pb2 as pb

ROUNDS = 10
LOADS = 5
QUESTION = "Say hello."
_REST_SECONDS = 4.0  # after an answer, in which the remaining work of the load is done

# Prints what mlx-lm needs to load a model and to write one token.
_PLAIN = """
import json, sys, time
began, used = time.perf_counter(), time.process_time()
from mlx_lm import load, stream_generate
model, tokenizer = load(sys.argv[1])
cpu = time.process_time() - used
messages = [{"role": "user", "content": sys.argv[2]}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
next(stream_generate(model, tokenizer, prompt, max_tokens=1))
first = time.perf_counter() - began
import mlx.core as mx, psutil
memory = psutil.Process().memory_info().rss - mx.get_active_memory()
print(json.dumps({"cpu": cpu, "first": first, "memory": memory}))
"""


@dataclass(frozen=True, slots=True)
class Load:
    """One load.

    cpu: seconds of CPU time until its end.
    first: seconds from its begin to the first token.
    memory: resident bytes, without the weights for mlx-lm.
    weights: bytes, as they are computed with.
    """

    cpu: float
    first: float
    memory: int
    weights: int = 0


def measure() -> Iterator[Figure]:
    """Measure both in turn, so that a busy machine slows both."""
    yield _start()
    model = default_model.ensure()
    with TemporaryDirectory() as cache:
        _loaded(model, cache)  # fills the system's cache of files
        with TemporaryDirectory() as empty:
            new = _loaded(model, empty)
        ours, plain = [], []
        for _ in range(LOADS):
            ours.append(_loaded(model, cache))
            plain.append(_plain(model))
    theirs = statistics.median(one.cpu for one in plain)
    for name, loads in (("first load", [new]), ("later loads", ours)):
        cpu = statistics.median(one.cpu for one in loads)
        figure = f"CPU time of LoadModel / load(), {name}"
        yield at_most(figure, cpu / theirs, 1.3, f"{cpu:.2f} / {theirs:.2f} s")
    first, other = (statistics.median(one.first for one in loads) for loads in (ours, plain))
    yield at_most(
        "LoadModel to first token / load() to first token",
        first / other,
        1.2,
        f"{first:.2f} / {other:.2f} s",
    )
    memory = statistics.median(one.memory for one in ours)
    least = ours[0].weights + statistics.median(one.memory for one in plain)
    yield at_most(
        "resident memory / weights + mlx-lm's process",
        memory / least,
        1.15,
        f"{memory / 2**20:.0f} / {least / 2**20:.0f} MiB",
    )


def _start() -> Figure:
    """Time from the start of the process to Health OK, against the time to import mlx_lm."""
    sides = {"health": _health, "import": _import}
    in_turn(lambda side, _: side(), sides, 1)
    health, alone = map(statistics.median, in_turn(lambda side, _: side(), sides, ROUNDS))
    return at_most(
        f"start to Health OK / import mlx_lm, median of {ROUNDS}",
        health / alone,
        1 / 3,
        f"{health * 1e3:.0f} / {alone * 1e3:.0f} ms",
    )


def _health() -> float:
    port = free_port()
    words = [str(ROOT / "run.sh"), "--addr", f"127.0.0.1:{port}"]
    quiet = {**environ, "MLX_BACKEND_LOG": "error"}
    started = time.perf_counter()
    with subprocess.Popen(words, env=quiet, stdin=subprocess.DEVNULL) as child:
        until_health(child, port)
        seconds = time.perf_counter() - started
        child.terminate()
    return seconds


def _import() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import mlx_lm"], check=True)
    return time.perf_counter() - started


def _loaded(model: Path, cache: str) -> Load:
    """Load a model in a new backend.

    cache: the folder for findings of loads.
    """
    with process({"MLX_BACKEND_CACHE": cache}) as (child, stub):
        observed = psutil.Process(child.pid)
        began, before = time.perf_counter(), _used(observed)
        load(stub, model)
        after = _used(observed)
        stream(stub, QUESTION, 1)
        first = time.perf_counter() - began
        time.sleep(_REST_SECONDS)
        weights = dict(stub.Status(pb.HealthMessage()).memory.breakdown)["weights"]
        memory = observed.memory_info().rss
    return Load(after - before, first, memory, weights)


def _plain(model: Path) -> Load:
    """Load a model with mlx-lm, in a process of its own."""
    ended = subprocess.run(
        command("-c", _PLAIN, str(model), QUESTION), check=True, stdout=subprocess.PIPE
    )
    return Load(**json.loads(ended.stdout))


def _used(observed: psutil.Process) -> float:
    """Return the CPU seconds that a process has used."""
    times = observed.cpu_times()
    return float(times.user + times.system)
