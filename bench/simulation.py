"""The planner's own time for a step, and how it serves conversations on modelled machines.

Before the latter, it shows how near a modelled machine comes to what was measured on a real one.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np

from backend.engine.planning.plan import (
    Arrived,
    CacheCost,
    DecodeTimed,
    Generated,
    Limits,
    PlannerEvent,
    Prefilled,
    PrefillTimed,
    Started,
)
from backend.engine.planning.planner import Planner
from backend.engine.planning.prefix_index import PrefixKey
from backend.engine.units import GIB
from bench.report import Figure, Table, at_most, fact
from tests.engine.simulation.agreement import MOST_ERROR, agreement
from tests.engine.simulation.outcome import HEADER, Outcome, replay
from tests.engine.simulation.setup import setups

SEQUENCES = 256
MOST_STEP = 1000.0  # microseconds
_STEPS = 100
_SPARE = 1 << 26  # free bytes; too few to admit a sequence
_ANSWER = 512  # tokens; all are charged at admission, so the charges stay constant
_STEP_SECONDS = 0.03


def measure() -> Iterator[Figure | Table]:
    for lacking in ("nobody waits", "slots", "memory"):
        waiting = 0 if lacking == "nobody waits" else SEQUENCES
        seconds = _planner_step(SEQUENCES, waiting, memory=lacking == "memory")
        name = f"planner step, {SEQUENCES} decode"
        if waiting:
            yield fact(f"{name}, {waiting} wait for {lacking}, us", seconds * 1e6)
        else:
            yield at_most(f"{name}, us", seconds * 1e6, MOST_STEP)
    for name, simulated, real in agreement():
        yield at_most(f"{name}: error of the simulation", abs(simulated / real - 1), MOST_ERROR)
    every = setups()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(every)), mp_context=context) as pool:
        outcomes = list(pool.map(_replayed, range(len(every))))
    rows = [(setup.name, *found.row) for setup, found in zip(every, outcomes, strict=True)]
    yield Table("Good answers come in the time that the setup allows.", HEADER, rows)
    refused = sum(found.ends["refused"] for found in outcomes)
    yield at_most("requests that the planner refused", refused, 0)


def _replayed(at: int) -> Outcome:
    setup = setups()[at]
    return replay(setup, setup.requests)


def _planner_step(decoding: int, waiting: int, *, memory: bool = False) -> float:
    """Return median processor seconds of a plan with this many decoding and waiting sequences.

    memory: whether they wait for memory, and not for a slot.
    """
    limits = Limits(
        cost=CacheCost(98_304, 0),
        slots=2 * decoding if memory else decoding,
        budget=1 << 50,
        prompt_cache=8 * GIB,
        max_entries=0,
        prefill_chunk=1 << 20,
        stall_ms=250,
    )
    planner = Planner(limits)
    drawn = np.random.default_rng(0)
    now = 0.0
    planner.plan(now, [_arrival(drawn, number) for number in range(decoding)])
    while len(planner.sequences.of("decode")) < decoding:
        now += _STEP_SECONDS
        plan = planner.plan(now, _results(planner))
        events: list[PlannerEvent] = [Started(start.sequence, 0) for start in plan.start]
        for group in plan.prefill:
            events += [Prefilled(part.sequence, part.end) for part in group]
            events.append(PrefillTimed(sum(part.end - part.start for part in group), 1e-6))
        planner.plan(now, events)
    if memory:
        planner.limits = replace(limits, budget=_charged(planner) + _SPARE)
    planner.plan(now, [_arrival(drawn, decoding + number) for number in range(waiting)])
    seconds = []
    for _ in range(_STEPS):
        now += _STEP_SECONDS
        news = _results(planner)
        began = time.thread_time()
        planner.plan(now, news)
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds)


def _charged(planner: Planner) -> int:
    """Return the bytes charged for the sequences in batches."""
    batches: dict[int, list[int]] = {}
    for sequence in planner.sequences.of("decode"):
        batches.setdefault(sequence.batch, []).append(sequence.charged)
    return sum(len(some) * planner.limits.cost.of(max(some)) for some in batches.values())


def _arrival(drawn: np.random.Generator, number: int) -> Arrived:
    tokens = drawn.integers(1, 150_000, int(drawn.integers(300, 1200)))
    return Arrived(number, PrefixKey(tokens), (0,) * len(tokens), _ANSWER)


def _results(planner: Planner) -> list[PlannerEvent]:
    tokens = {sequence.number: (7,) for sequence in planner.sequences.of("decode")}
    return [Generated(tokens), DecodeTimed(_STEP_SECONDS)] if tokens else []
