"""The result of the planner under a load, as one row of a table."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backend.engine.planning.planner import Planner
from tests.engine.simulation.replay import Replay, Replayed, Request
from tests.engine.simulation.setup import Setup
from tests.engine.simulation.traffic import conversations

HEADER = (
    "machine and model",
    "TTFT p50",
    "p99",
    "gap p99",
    "good",
    "refused",
    "preempted",
    "reuse",
    "slower p99",
    "overtaken",
    "KV peak",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one run.

    first_token: the median and the 99th percentile of the seconds to the first token.
    gap: the 99th percentile of the seconds between two tokens.
    good: the share of answers within the setup's limits.
    ends: the number of requests by how they ended.
    reuse: the share of prompt tokens that were not computed.
    slowdown: the 99th percentile of an answer's time relative to its time on an idle machine.
    overtaken: how many later requests started before the same earlier one, at most.
    peak: the most bytes of KV, as a share of the available memory.
    """

    first_token: tuple[float, float]
    gap: float
    good: float
    ends: dict[str, int]
    preemptions: int
    reuse: float
    slowdown: float
    overtaken: int
    peak: float

    @property
    def row(self) -> tuple[str, ...]:
        """The columns of `HEADER`, without the first."""
        return (
            *(f"{seconds:.2f} s" for seconds in self.first_token),
            f"{self.gap * 1e3:.0f} ms",
            f"{self.good:.1%}",
            str(self.ends["refused"]),
            str(self.preemptions),
            f"{self.reuse:.1%}",
            f"{self.slowdown:.1f}",
            str(self.overtaken),
            f"{self.peak:.0%}",
        )


def outcome(setup: Setup, replayed: Replayed) -> Outcome:
    requests = replayed.requests
    answered = [request for request in requests if request.end == "answered"]
    waits = [request.first - request.arrived for request in requests if request.first is not None]
    slowdowns = [(request.ended - request.arrived) / request.alone for request in answered]
    return Outcome(
        first_token=(_percentile(waits, 50), _percentile(waits, 99)),
        gap=_percentile(replayed.gaps, 99),
        good=sum(_good(setup, request) for request in answered) / len(requests),
        ends={
            end: sum(request.end == end for request in requests)
            for end in ("answered", "left", "refused")
        },
        preemptions=replayed.preemptions,
        reuse=sum(request.reused or 0 for request in requests)
        / sum(request.prompt for request in requests),
        slowdown=_percentile(slowdowns, 99),
        overtaken=max(request.overtaken for request in requests),
        peak=replayed.peak / setup.limits.budget,
    )


def _good(setup: Setup, request: Request) -> bool:
    """Whether the first token and, on average, the others came in time."""
    if request.first is None or request.first - request.arrived > setup.first_token:
        return False
    return request.latest - request.first <= setup.gap * max(request.answer - 1, 1)


def _percentile(values: Sequence[float] | array[float], share: int) -> float:
    """The percentile of some values; NaN if there are none."""
    return float(np.percentile(np.asarray(values), share)) if len(values) else float("nan")


def replay(setup: Setup, requests: int, seed: int = 1) -> Outcome:
    """Simulate the planner under a setup's load. Raises BrokenPlanError."""
    load = conversations(seed, requests, setup.load)
    return outcome(setup, Replay(setup, Planner(setup.limits), load).run())
