"""The backend over gRPC against mlx_lm.server over HTTP, and against bare `stream_generate`.

Both sides have the same float32 weights, the same OpenBLAS with the same number of threads, and
the same prompts. They take turns, and only one of them works at a time. Figures are ratios of the
medians of several rounds, except where rounds are short enough for pairs (`bench.pairs`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from backend.engine.settings import Settings
from bench import peer
from bench.checkpoint import comparable
from bench.pairs import at_least_in_pairs, in_turn, ratio
from bench.process import Run, backend, stream, text, together
from bench.report import Figure, at_least, at_most

STREAMS = 8
TOKENS = 64
ROUNDS = 3
SHORT = (25,) * 8  # words; the template adds 35 tokens to SmolLM2's
MIXED = tuple(range(25, 166, 9))
LONG = 3650
SHARED = 700
OVERHEAD = {4: 1.2, 8: 1.6, 16: 2.0}  # number of streams: the minimum ratio
OVERHEAD_TOKENS = 200
OVERHEAD_PAIRS = 15
OVERHEAD_SECONDS = 60.0  # for the pairs of one comparison
PEER = "mlx_lm.server"


class Ask(Protocol):
    def __call__(self, prompt: str, tokens: int, run: Run | None = None) -> Run: ...


def measure(model: Path) -> Iterator[Figure]:
    folder = comparable(model)
    with _both(folder, (1, STREAMS)) as sides:
        with peer.plain(folder) as alone:
            yield _lone(sides["backend"], alone)
        values = in_turn(
            lambda ask, turn: together(ask, _prompts(f"Story {turn}", STREAMS), TOKENS),
            sides,
            ROUNDS,
        )
        yield at_least(f"tokens/s at {STREAMS} streams / {PEER}", *ratio(values, 1))
        yield _burst("8 prompts of 60 tokens at once", SHORT, 0.9, sides)
        yield _burst("16 prompts of 60 to 200 tokens at once", MIXED, 1.0, sides)
        yield from _shared_prefix(sides)
        yield from _newcomer(sides)


def overhead(model: Path) -> Iterator[Figure]:
    """Compare the overhead of the servers, with a model that needs almost no compute."""
    with _both(comparable(model), tuple(OVERHEAD)) as sides:
        for width, least in OVERHEAD.items():

            def speed(side: str, turn: int, width: int = width) -> float:
                return together(sides[side], _prompts(f"Story {turn}", width), OVERHEAD_TOKENS)

            yield at_least_in_pairs(
                f"tokens/s of the tiny model at {width} streams / {PEER}",
                least,
                partial(speed, "backend"),
                partial(speed, PEER),
                pairs=OVERHEAD_PAIRS,
                seconds=OVERHEAD_SECONDS,
            )


@contextmanager
def _both(folder: Path, widths: Sequence[int]) -> Iterator[dict[str, Ask]]:
    """Both servers with the checkpoint, warm for these numbers of streams."""
    with backend(folder) as stub, peer.server(folder) as port:
        sides: dict[str, Ask] = {"backend": partial(stream, stub), PEER: partial(peer.stream, port)}
        for ask in sides.values():
            for width in widths:
                together(ask, _prompts("Warm up", width), 8)
        yield sides


def _lone(ours: Ask, alone: Callable[[object], float]) -> Figure:
    ways: dict[str, Callable[[str], float]] = {
        "backend": lambda prompt: together(ours, [prompt], TOKENS),
        "stream_generate": lambda prompt: alone({"prompt": prompt, "tokens": TOKENS}),
    }
    values = in_turn(lambda way, turn: way(f"Tell me story {turn}."), ways, ROUNDS)
    return at_least("tokens/s of one stream / bare stream_generate", *ratio(values, 0.97))


def _burst(name: str, lengths: Sequence[int], bound: float, sides: Mapping[str, Ask]) -> Figure:
    def slowest(ask: Ask, turn: int) -> float:
        prompts = [text(f"{name} {turn} {at}", words) for at, words in enumerate(lengths)]
        return _slowest_first(ask, prompts)

    return at_most(f"{name}: slowest first token", *ratio(in_turn(slowest, sides, ROUNDS), bound))


def _shared_prefix(sides: Mapping[str, Ask]) -> Iterator[Figure]:
    """Measure 8 clients whose prompts share a prefix: first not cached, then cached."""

    def asked(state: str, turn: int) -> list[str]:
        prefix = text(f"shared {turn}", SHARED)
        return [f"{prefix}. What is {state} {at}?" for at in range(STREAMS)]

    values = in_turn(lambda ask, turn: _slowest_first(ask, asked("cold", turn)), sides, 2)
    yield at_most("cold prefix of 700 words: slowest first token", *ratio(values, 0.4))
    values = in_turn(lambda ask, turn: _slowest_first(ask, asked(f"warm {turn}", 0)), sides, ROUNDS)
    yield at_most("warm prefix of 700 words: slowest first token", *ratio(values, 1))


def _newcomer(sides: Mapping[str, Ask]) -> Iterator[Figure]:
    """Measure a short prompt that arrives while a long one is prefilled and another one streams."""
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


def _beside_prefill(ask: Ask) -> tuple[float, float]:
    """Return the seconds to the short prompt's first token, and the longest gap of the stream."""
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


def _slowest_first(ask: Ask, prompts: Sequence[str]) -> float:
    """Return the seconds from the first call until all clients have their first token."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        runs = list(pool.map(lambda prompt: ask(prompt, 2), prompts))
    return max(run.started + run.first for run in runs) - started


def _prompts(name: str, count: int) -> list[str]:
    return [f"{name}, number {at}: tell me a long story." for at in range(count)]
