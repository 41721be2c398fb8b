"""The time that the planner itself needs for a step, in seconds on this machine."""

from __future__ import annotations

import statistics
import time
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

_STEPS = 100
_SPARE = 1 << 26  # free bytes; too few to admit a sequence
_ANSWER = 512  # tokens; all are charged at admission, so the charges stay constant
_STEP_SECONDS = 0.03


def planner_step(decoding: int, waiting: int, *, memory: bool = False) -> float:
    """Median processor seconds of a plan with this many decoding and waiting sequences.

    memory: whether they wait for memory, and not for a slot.
    """
    limits = Limits(
        cost=CacheCost(98_304, 0),
        slots=2 * decoding if memory else decoding,
        room=1 << 50,
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
        planner.limits = replace(limits, room=_charged(planner) + _SPARE)
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
    """Bytes charged for the sequences in batches."""
    batches: dict[int, list[int]] = {}
    for sequence in planner.sequences.of("decode"):
        batches.setdefault(sequence.batch, []).append(sequence.charged)
    return sum(len(some) * planner.limits.cost.of(max(some)) for some in batches.values())


def _arrival(drawn: np.random.Generator, number: int) -> Arrived:
    tokens = drawn.integers(1, 150_000, int(drawn.integers(300, 1200)))
    return Arrived(number, PrefixKey(tokens), (0,) * len(tokens), _ANSWER)


def _results(planner: Planner) -> list[PlannerEvent]:
    events: list[PlannerEvent] = [
        Generated({sequence.number: (7,) for sequence in planner.sequences.of("decode")})
    ]
    return [*events, DecodeTimed(_STEP_SECONDS)]
