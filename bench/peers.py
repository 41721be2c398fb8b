"""The backend over gRPC against mlx_lm.server over HTTP, and against bare `stream_generate`.

Both sides have the same float32 weights, the same OpenBLAS with the same number of threads, and
the same prompts. They take turns, and only one of them works at a time. The values of every round
are printed when it is over, and figures are ratios of the medians, except where rounds are short
enough for pairs (`bench.pairs`).
"""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from backend.engine.heartbeat import counted
from backend.engine.settings import Settings
from bench import bare, peer
from bench.checkpoint import comparable
from bench.pairs import at_least_in_pairs
from bench.process import Run, backend, stream, together
from bench.report import Figure, at_least, at_most, fact

STREAMS = 8
TOKENS = 64
THREADS = (1, 2)  # the peer runs with each of these numbers of OpenBLAS threads
ROUNDS = 3
BLAS_TOKENS = 32  # per stream; fewer than in other measurements, because this one takes longest
BLAS_SECONDS = 180.0  # seconds for the rounds of one comparison; at least one is run
SHORT = (25,) * 8  # words; the template adds 35 tokens to SmolLM2's
MIXED = tuple(range(25, 166, 9))
LONG = 3650
SHARED = 700
OVERHEAD = {4: 1.2, 8: 1.6, 16: 2.0}  # number of streams: the minimum ratio
OVERHEAD_TOKENS = 200
OVERHEAD_PAIRS = 15
OVERHEAD_SECONDS = 60.0  # for the pairs of one comparison
_WORDS = (
    "the of and to in is that for it as was with be by on not he this are or his from at which"
    " but have an had they you were their one all we can her has there been if more when will"
).split()


PEER = "mlx_lm.server"
Side = TypeVar("Side")
Figures = Iterator[Figure]


class Ask(Protocol):
    def __call__(self, prompt: str, tokens: int, run: Run | None = None) -> Run: ...


def measure(model: Path) -> Figures:
    folder = comparable(model)
    with backend(folder) as stub, peer.server(folder) as port, bare.loop(folder) as alone:
        sides: dict[str, Ask] = _beside_peer(partial(stream, stub), port)
        for ask in sides.values():
            for width in (1, STREAMS):
                together(ask, _prompts("Warm up", width), 8)
        alone("Warm up.", 8)
        yield from _lone(sides["backend"], alone)
        yield from _burst("8 prompts of 60 tokens at once", SHORT, 0.9, sides)
        yield from _burst("16 prompts of 60 to 200 tokens at once", MIXED, 1.0, sides)
        yield from _shared_prefix(sides)
        yield from _newcomer(sides)


def overhead(model: Path) -> Figures:
    """Compare the overhead of the servers, with a model that needs almost no compute.

    What remains are the servers and MLX's time to launch many small operations, which bare decode
    steps show.
    """
    folder = comparable(model)
    with backend(folder) as stub, peer.server(folder) as port:
        sides = _beside_peer(partial(stream, stub), port)
        for width, least in OVERHEAD.items():
            for ask in sides.values():
                together(ask, _prompts("Warm up", width), 8)

            def speed(side: str, turn: int, width: int = width) -> float:
                prompts = _prompts(f"Story {turn}", width)
                return together(sides[side], prompts, OVERHEAD_TOKENS)

            yield at_least_in_pairs(
                f"tokens/s of the tiny model at {width} streams / {PEER}",
                least,
                partial(speed, "backend"),
                partial(speed, PEER),
                pairs=OVERHEAD_PAIRS,
                seconds=OVERHEAD_SECONDS,
            )
            yield fact(
                "tokens/s of the same decode steps without any host",
                bare.steps(folder, width, OVERHEAD_TOKENS),
            )


def blas(model: Path) -> Figures:
    """Compare with the peer at its best number of BLAS threads, on an idle and a busy machine."""
    folder = comparable(model)
    with ExitStack() as stack:
        sides: dict[str, Ask] = {"backend": partial(stream, stack.enter_context(backend(folder)))}
        for threads in THREADS:
            port = stack.enter_context(peer.server(folder, threads))
            sides[f"{PEER} with {counted(threads, 'thread')}"] = partial(peer.stream, port)
        for ask in sides.values():
            together(ask, _prompts("Warm up", STREAMS), 8)
        yield from _at_best("", sides)
        with neighbours(os.cpu_count() or 1):
            yield from _at_best(", busy neighbours", sides)


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run `count` processes that compute without end."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _at_best(where: str, sides: Mapping[str, Ask]) -> Figures:
    values = yield from _turns(
        lambda ask, n: together(ask, _prompts(f"Story{where} {n}", STREAMS), BLAS_TOKENS),
        sides,
        "tokens/s",
        seconds=BLAS_SECONDS,
    )
    ours, *theirs = map(statistics.median, values)
    name = f"tokens/s at {STREAMS} streams{where}"
    shown = ", ".join(f"{speed:.1f}" for speed in theirs)
    yield at_least(f"{name} / {PEER}", ours / max(theirs), 1, f"{ours:.1f} / {shown}")
    if len(values[0]) > 1:
        yield at_least(f"{name}: slowest round / median", min(values[0]) / ours, 0.5)


def _lone(ours: Ask, alone: Callable[[str, int], float]) -> Figures:
    def of_ours(prompt: str, tokens: int) -> float:
        return together(ours, [prompt], tokens)

    values = yield from _turns(
        lambda side, n: side(f"Tell me story {n}.", TOKENS),
        {"backend": of_ours, "stream_generate": alone},
        "tokens/s",
    )
    yield at_least("tokens/s of one stream / bare stream_generate", *_ratio(values, 0.97))


def _burst(name: str, lengths: Sequence[int], bound: float, sides: Mapping[str, Ask]) -> Figures:
    def slowest(ask: Ask, turn: int) -> float:
        prompts = [text(f"{name} {turn} {at}", words) for at, words in enumerate(lengths)]
        return _slowest_first(ask, prompts)

    values = yield from _turns(slowest, sides, "s")
    yield at_most(f"{name}: slowest first token", *_ratio(values, bound))


def _shared_prefix(sides: Mapping[str, Ask]) -> Figures:
    """8 clients whose prompts share a prefix: first not cached, then cached."""

    def asked(state: str, turn: int) -> list[str]:
        prefix = text(f"shared {turn}", SHARED)
        return [f"{prefix}. What is {state} {at}?" for at in range(STREAMS)]

    values = yield from _turns(
        lambda ask, n: _slowest_first(ask, asked("cold", n)), sides, "s", rounds=2
    )
    yield at_most("cold prefix of 700 words: slowest first token", *_ratio(values, 0.4))
    values = yield from _turns(
        lambda ask, n: _slowest_first(ask, asked(f"warm {n}", 0)), sides, "s"
    )
    yield at_most("warm prefix of 700 words: slowest first token", *_ratio(values, 1))


def _newcomer(sides: Mapping[str, Ask]) -> Figures:
    """A short prompt that arrives while a long one is prefilled and another one streams."""
    (first, gap), (first_of_theirs, gap_of_theirs) = map(_beside_prefill, sides.values())
    yield at_most(
        f"newcomer during a long prefill: first token / {PEER}",
        first / first_of_theirs,
        0.05,
        f"{first:.2f} / {first_of_theirs:.2f} s",
    )
    stall = Settings().stall_ms / 1e3
    yield at_most(
        "longest gap of a stream meanwhile / stall_ms",
        gap / stall,
        3,
        f"{gap:.2f} / {gap_of_theirs:.2f} s",
    )


def _beside_peer(ours: Ask, port: int) -> dict[str, Ask]:
    return {"backend": ours, PEER: partial(peer.stream, port)}


def _beside_prefill(ask: Ask) -> tuple[float, float]:
    """Seconds to the short prompt's first token, and the running stream's longest gap."""
    running, prefilled = Run(), Run()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(ask, "Write a very long story.", 2000, running)
        running.begun.wait()
        began = time.perf_counter()
        done = pool.submit(ask, text("long", LONG), 1, prefilled)
        time.sleep(1)
        newcomer = ask("Say hello.", 1)
        done.result()
        ended = time.perf_counter()
        running.leave.set()
    return newcomer.first, running.longest_gap(began, ended)


def _ratio(values: Sequence[Sequence[float]], bound: float) -> tuple[float, float, str]:
    """The ratio of two sides' medians, the bound, and the medians in words."""
    mine, others = map(statistics.median, values)
    return mine / others, bound, f"{mine:.3g} / {others:.3g}"


def _turns(
    measured: Callable[[Side, int], float],
    sides: Mapping[str, Side],
    unit: str,
    *,
    rounds: int = ROUNDS,
    seconds: float = math.inf,
) -> Generator[Figure, None, list[list[float]]]:
    """Measure the sides in turn, print each round, and return the values of each side.

    measured: called with a side and the round. seconds: no round starts that would exceed this.
    """
    values: list[list[float]] = [[] for _ in sides]
    started = time.perf_counter()
    for turn in range(rounds):
        spent = time.perf_counter() - started
        if turn and spent + spent / turn > seconds:
            break
        for side, found in zip(sides.values(), values, strict=True):
            found.append(measured(side, turn))
        latest = (f"{name} {found[-1]:.3g}" for name, found in zip(sides, values, strict=True))
        yield Figure(f"    round {turn + 1}", f"{', '.join(latest)} {unit}")
    return values


def _slowest_first(ask: Ask, prompts: Sequence[str]) -> float:
    """Seconds from the first call until all clients have their first token."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        runs = list(pool.map(lambda prompt: ask(prompt, 2), prompts))
    return max(run.started + run.first for run in runs) - started


def _prompts(name: str, count: int) -> list[str]:
    return [f"{name}, number {at}: tell me a long story." for at in range(count)]


def text(seed: str, count: int) -> str:
    """`count` short words in a pseudo-random order."""
    return " ".join(random.Random(seed).choices(_WORDS, k=count))
