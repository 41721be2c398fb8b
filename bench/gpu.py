"""`make bench BENCH=gpu`: this machine's speed beside mlx-lm's, in at most 8 minutes.

Models have random weights in the shapes of a small and a medium model, so nothing is downloaded.
The result is a table for docs/hardware.md, and build/gpu.json for an issue. On a CPU the shapes are
tiny: that shows only that the measurement works. BENCH_SECONDS shortens it: what does not fit is
left out.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from bench import peer
from bench.checkpoint import TINY, TINY_IDS, copy_tokenizer
from bench.process import ROOT, Run, load, process, stream, text
from bench.report import Table
from cli.backend_process import environment_of
from cli.doctor import machine
from common.launch import command
from wire import backend_pb2 as pb

SECONDS = 420.0  # after which nothing more begins
REPORT = ROOT / "build" / "gpu.json"
_ROUNDS = 2  # the better one counts, because the first use of a shape takes longer
_SHARE = 0.6  # share of the usable memory that weights may need
_AFTER_FIRST = -1.0  # start of a request that follows the first token of another

_SIZES = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    " intermediate_size vocab_size"
).split()


def _config(kind: str, *sizes: int) -> dict[str, Any]:
    shared = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 40960}
    sized = dict(zip(_SIZES, sizes, strict=True))
    return {"model_type": kind, "tie_word_embeddings": True, **shared, **sized}


SMALL = _config("llama", 576, 30, 9, 3, 64, 1536, 49152)
MEDIUM = _config("qwen3", 2560, 36, 32, 8, 128, 9728, 151936)
SMALLEST = _config("qwen3", 64, 2, 2, 1, 32, 128, 1024)
FOUR_BITS = {"quantization": {"group_size": 64, "bits": 4}}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a measurement.

    prompts: numbers of tokens of a prompt.
    widths: numbers of answers at once.
    tokens: number of tokens of an answer."""

    prompts: Sequence[int] = (128, 512, 4096)
    widths: Sequence[int] = (1, 8, 32)
    tokens: int = 128


MODELS = {
    "135M, bfloat16": SMALL,
    "4B, 4 bits": MEDIUM | FOUR_BITS,
    "4B, bfloat16": MEDIUM,
    "135M, 4 bits": SMALL | FOUR_BITS,
}
TINY_MODELS = {"tiny, bfloat16": SMALLEST, "tiny, 4 bits": SMALLEST | FOUR_BITS}
TINY_SIZES = Sizes((16, 64, 256), (1, 2, 4), 16)


class Ask(NamedTuple):
    """A request.

    start: seconds after the first request, or _AFTER_FIRST.
    """

    prompt: str
    tokens: int
    start: float = 0.0


class Side(NamedTuple):
    """One of the two programs.

    peak: returns the most bytes that MLX has held.
    ask: sends `bench.plain_batches` a request; None if the program is another.
    """

    serve: Callable[[Sequence[Ask]], list[Run]]
    peak: Callable[[], float]
    ask: Callable[[object], Any] | None = None


def measure() -> Iterator[Table]:
    until = time.perf_counter() + float(os.environ.get("BENCH_SECONDS", SECONDS))
    found = machine()
    device = found.figures["device"]
    models, sizes = (TINY_MODELS, TINY_SIZES) if device["kind"] == "cpu" else (MODELS, Sizes())
    results: list[dict[str, Any]] = []
    for name, config in models.items():
        if time.perf_counter() < until and _bytes(config) < _SHARE * device["usable_bytes"]:
            for (figure, unit), values in _of_model(name, config, sizes, until).items():
                results.append({"model": name, "figure": figure, "unit": unit, **values})
    report = {**found.figures, "order": os.environ.get("ORDER", ""), "results": results}
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    header = ("model", "figure", "unit", *SIDES, "ratio")
    yield Table(f"{found.detail}\n", header, list(map(_row, results)))


def _row(one: Mapping[str, Any]) -> Sequence[str]:
    ours, theirs = (one.get(side) for side in SIDES)
    ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
    shown = ["" if value is None else f"{value:,.4g}" for value in (ours, theirs)]
    return one["model"], one["figure"], one["unit"], *shown, ratio


def _of_model(
    name: str, config: Mapping[str, Any], sizes: Sizes, until: float
) -> dict[tuple[str, str], dict[str, float]]:
    """Return the figures of both programs with one model, by name and unit, then by program."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "random"
        _write(folder, config)
        for side, start in SIDES.items():
            with ExitStack() as running:
                began = time.perf_counter()
                program = start(folder, running)
                program.serve([Ask("Hello.", 1)])
                loaded = "load to the first token", "s", time.perf_counter() - began
                for figure, unit, value in chain([loaded], _figures(program, sizes, name)):
                    found.setdefault((figure, unit), {})[side] = value
                    if time.perf_counter() > until:
                        break
                if program.ask is not None and time.perf_counter() < until:
                    found |= _of_steps(program.ask, sizes)
    return found


def _of_steps(
    ask: Callable[[object], Any], sizes: Sizes
) -> dict[tuple[str, str], dict[str, float]]:
    """Return the figures of decode steps outside both programs, by name and unit.

    ask: sends `bench.plain_batches` a request.
    """
    found = {}
    for rows in sizes.widths:
        theirs, ours = ask(rows)
        counts = dict(zip(SIDES, (ours, theirs), strict=True))
        found[f"kernels of a decode step, rows: {rows}", ""] = counts
    for rows in sizes.widths:
        speeds = ask({"compiled": rows, "tokens": sizes.tokens})
        for kind, speed in zip(("plain", "compiled"), speeds, strict=True):
            figure = f"{kind} steps without a scheduler, rows: {rows}"
            found[figure, "tokens/s"] = {"mlx-lm": speed}
    return found


def _figures(side: Side, sizes: Sizes, seed: str) -> Iterator[tuple[str, str, float]]:
    """Yield what is measured: name, unit and value.

    seed: the seed of the prompts; no two prompts begin alike.
    """

    def prompt(label: str, tokens: int) -> str:
        return _prompt(f"{seed} {label}", tokens)

    *_, longest = sizes.prompts
    for tokens in sizes.prompts:
        asked = [Ask(prompt(f"prefill {turn}", tokens), 1) for turn in range(_ROUNDS)]
        runs = [side.serve([ask])[0] for ask in asked]
        speed = max(run.prompt_tokens / run.first for run in runs)
        yield f"prefill of {tokens} tokens", "tokens/s", speed
    for rows in sizes.widths:
        speeds = []
        for turn in range(_ROUNDS):
            prompts = [prompt(f"decode {turn} {at}", 24 + at) for at in range(rows)]
            runs = side.serve([Ask(one, sizes.tokens) for one in prompts])
            speeds.append(sum((run.tokens - 1) / (run.seconds - run.first) for run in runs))
        yield f"decode, rows: {rows}", "tokens/s", max(speeds)
    runs = side.serve(list(_mixed(sizes, prompt)))
    began, ended = (
        min(run.started for run in runs),
        max(run.started + run.seconds for run in runs),
    )
    yield "mixed arrivals", "tokens/s", sum(run.tokens for run in runs) / (ended - began)
    yield "mixed arrivals, slowest first token", "s", max(run.first for run in runs)
    first = prompt("turn", longest // 2)
    side.serve([Ask(first, 8)])
    (second,) = side.serve([Ask(f"{first} {text('second', 20)}", 1)])
    yield "first token of the second turn", "s", second.first
    asks = [Ask(prompt("running", 32), 4 * sizes.tokens)]
    asks.append(Ask(prompt("beside", longest), 1, _AFTER_FIRST))
    running, beside = side.serve(asks)
    gap = running.longest_gap(beside.started, running.started + running.seconds)
    yield f"longest gap beside a prefill of {longest} tokens", "s", gap
    yield "peak memory", "MiB", side.peak() / (1 << 20)


def _mixed(sizes: Sizes, prompt: Callable[[str, int], str]) -> Iterator[Ask]:
    """Prompts of different lengths, of which about 20 arrive in a second."""
    dice, start = random.Random(1), 0.0
    for at in range(2 * sizes.widths[1]):
        length = dice.randint(sizes.prompts[0] // 4, sizes.prompts[1])
        yield Ask(prompt(f"mixed {at}", length), sizes.tokens // 2, start)
        start += dice.expovariate(20.0)


def _backend(folder: Path, running: ExitStack) -> Side:
    _, stub = running.enter_context(process(module="bench.measured_backend"))
    load(stub, folder, Options=["parallel:32"])

    def serve(asks: Sequence[Ask]) -> list[Run]:
        runs = [Run() for _ in asks]

        def one(run: Run, ask: Ask) -> None:
            if ask.start < 0:
                runs[0].begun.wait()
            else:
                time.sleep(ask.start)
            run.started = time.perf_counter()
            stream(stub, ask.prompt, ask.tokens, run, chat=False)

        with ThreadPoolExecutor(len(asks)) as pool:
            list(pool.map(one, runs, asks))
        return runs

    def peak() -> float:
        return float(stub.Status(pb.HealthMessage()).memory.breakdown["mlx_peak"])

    return Side(serve, peak)


def _plain(folder: Path, running: ExitStack) -> Side:
    ask = running.enter_context(peer.plain(folder))
    peak = 0.0

    def serve(asks: Sequence[Ask]) -> list[Run]:
        nonlocal peak
        answer = ask(asks)
        peak = answer["peak"]
        return [Run(**run) for run in answer["runs"]]

    return Side(serve, lambda: peak, ask)


SIDES: Mapping[str, Callable[[Path, ExitStack], Side]] = {"mlx-backend": _backend, "mlx-lm": _plain}


def _write(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a checkpoint, with a tokenizer in which every token of the vocabulary has a text."""
    copy_tokenizer(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = {*vocabulary.values(), *(one["id"] for one in tokenizer["added_tokens"])}
    vocabulary |= {f"\u0120x{at}": at for at in range(config["vocab_size"]) if at not in known}
    file.write_text(json.dumps(tokenizer))
    described = json.dumps({**TINY_IDS, **config})
    script = ["-m", "bench.plain_batches", str(folder), described, str(len(known))]
    subprocess.run(command(*script), env=environment_of({}), cwd=ROOT, check=True)


def _bytes(config: Mapping[str, Any]) -> float:
    """Return the bytes of a model's weights, nearly."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    attention = (
        2 * config["head_dim"] * (config["num_attention_heads"] + config["num_key_value_heads"])
    )
    each = hidden * (attention + 3 * config["intermediate_size"])
    weights: int = config["vocab_size"] * hidden + layers * each
    return weights * (4.5 if "quantization" in config else 16.0) / 8


def _prompt(seed: str, tokens: int) -> str:
    """Return a text of about `tokens` tokens that begins like no text with another seed."""
    words = f"{seed}: {text(seed, tokens)}"
    return _tokenizer().decode(_tokenizer().encode(words).ids[:tokens])


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))
