"""`make bench BENCH=simulation`: compares the planner with mlx_lm.server, on modelled machines.

Before that, it shows how near a modelled machine comes to what was measured on a real one.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from backend.engine.planning.plan import Limits
from backend.engine.planning.planner import Planner
from backend.engine.planning.prefix_index import PrefixKey
from bench.report import Figure, Table, at_least, at_most, fact
from bench.simulation.outcome import HEADER, Outcome, outcome
from bench.simulation.replay import Policy, Replay
from bench.simulation.server import Server
from bench.simulation.setup import Setup, measured, setups
from bench.simulation.step_cost import planner_step
from bench.simulation.traffic import Conversation, Turn, conversations

SEED = 1
SEQUENCES = 256
MOST_STEP = 1000.0  # microseconds
MOST_SECONDS = 120.0
MOST_ERROR = 0.2
_WARM = (8, 16, 64, 512)  # tokens of the prompts before a burst
_QUIET = 60.0  # seconds from their start to the burst


class Present(Planner):
    """The planner, which guarantees to stay within the memory and the slots."""

    bounded = True


POLICIES: dict[str, Callable[[Limits], Policy]] = {
    "planner": Present,
    "mlx_lm": Server,
}


def _processor_seconds() -> float:
    """Processor seconds of this process and of its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure() -> Iterator[Figure | Table]:
    began, used = time.perf_counter(), _processor_seconds()
    for lacking in ("nobody waits", "slots", "memory"):
        waiting = 0 if lacking == "nobody waits" else SEQUENCES
        seconds = planner_step(SEQUENCES, waiting, memory=lacking == "memory")
        name = f"planner step, {SEQUENCES} decode"
        if waiting:
            yield fact(f"{name}, {waiting} wait for {lacking}, us", seconds * 1e6)
        else:
            yield at_most(f"{name}, us", seconds * 1e6, MOST_STEP)
    for name, simulated, real in agreement():
        yield at_most(f"{name}: error of the simulation", abs(simulated / real - 1), MOST_ERROR)
    every = setups()
    jobs = [(at, name) for at in range(len(every)) for name in POLICIES]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(jobs)), mp_context=context) as pool:
        outcomes = dict(zip(jobs, pool.map(_run, *zip(*jobs, strict=True)), strict=True))
    for at, setup in enumerate(every):
        yield from _report(setup, {name: outcomes[at, name] for name in POLICIES})
    used = _processor_seconds() - used  # other measurements may have run before
    wall = f"{time.perf_counter() - began:.0f} s in all, other programs included"
    yield at_most("simulation, seconds of two cores", used / 2, MOST_SECONDS, wall)


def replay(setup: Setup, policy: str, requests: int, seed: int = SEED) -> Outcome:
    """Simulate a policy under a setup's load. Raises BrokenPlanError."""
    load = conversations(seed, requests, setup.load)
    return outcome(setup, Replay(setup, POLICIES[policy](setup.limits), load).run())


def burst(setup: Setup, prompts: Sequence[int], answer: int) -> float:
    """Tokens per second of prompts that arrive within 20 ms at a server that is warm and idle.

    prompts: their tokens. answer: tokens of each answer. The time begins with the first token.
    """
    dice, empty = random.Random(SEED), PrefixKey(())
    warm = [Conversation("chat", 0.0, empty, tuple(Turn(n, 2, 1.0, None) for n in _WARM), 0)]
    asked = [
        Conversation("chat", _QUIET + dice.uniform(0, 0.02), empty, (Turn(n, answer, 0, None),), at)
        for at, n in enumerate(prompts, 1)
    ]
    made = Replay(setup, Present(setup.limits), [*warm, *asked]).run()
    runs = made.requests[len(_WARM) :]
    began = min(run.first or 0.0 for run in runs)
    return len(prompts) * answer / (max(run.ended for run in runs) - began)


def agreement() -> Iterator[tuple[str, float, float]]:
    """The figures of [[measured]]: name, as simulated, and as measured."""
    dice = random.Random(SEED)
    for one in measured():
        for rows, speed in zip(one.rows, one.decode, strict=True):
            prompts = [dice.randint(46, 57) for _ in range(rows)]
            name = f"{one.machine.name}, {one.model.name}, answers at once: {rows}, tokens/s"
            yield name, burst(one.setup(rows), prompts, 128), speed
        if one.prefill is not None:
            tokens, speed = one.prefill
            seconds = one.setup(1).prefill_seconds(1, tokens, 0) + one.machine.shape
            yield (
                f"{one.machine.name}, {one.model.name}, prefill, tokens/s",
                tokens / seconds,
                speed,
            )


def _run(at: int, policy: str) -> Outcome:
    setup = setups()[at]
    return replay(setup, policy, setup.requests)


def _report(setup: Setup, outcomes: dict[str, Outcome]) -> Iterator[Figure | Table]:
    room = setup.limits.room
    title = (
        f"{setup.name}: {setup.requests} requests, {setup.load} per second, {setup.slots} slots,"
        f" {room / 1e9:.0f} GB for KV; good: first token within {setup.first_token:.0f} s, then"
        f" {setup.gap * 1e3:.0f} ms a token"
    )
    yield Table(title, HEADER, [(name, *one.row) for name, one in outcomes.items()])
    ours, theirs = outcomes["planner"], outcomes["mlx_lm"]
    ratio = ours.good / max(theirs.good, 1)
    yield at_least(f"{setup.machine.name}: good answers, planner / mlx_lm", ratio, 1.0)
    yield at_most(f"{setup.machine.name}: refused", ours.ends["refused"], 0)
