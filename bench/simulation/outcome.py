"""The result of a policy under a load, as one row of a table."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.simulation.replay import Replayed, Request
from bench.simulation.setup import Setup
from bench.simulation.traffic import Kind

HEADER = (
    "policy",
    "TTFT p50",
    "p95",
    "p99",
    "gap p99",
    "good/min",
    "good",
    "answered",
    "left",
    "refused",
    "preempted",
    "reuse",
    "slower p99: chat",
    "agent",
    "burst",
    "Jain",
    "overtaken",
    "KV peak",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one run.

    first_token: percentiles of the seconds to the first token. gap: 99th percentile of the seconds
    between two tokens. good: number of answers within the setup's limits. reuse: share of prompt
    tokens that were not computed. slowdown: by kind, the 99th percentile of an answer's time
    relative to its time on an idle machine. fairness: Jain's index of the inverse slowdowns, 0 to
    1. peak: the most bytes of KV, as a share of the available memory.
    """

    first_token: dict[int, float]
    gap: float
    good: int
    requests: int
    minutes: float
    ends: dict[str, int]
    preemptions: int
    reuse: float
    slowdown: dict[Kind, float]
    fairness: float
    overtaken: int
    peak: float

    @property
    def row(self) -> tuple[str, ...]:
        """The columns of `HEADER`, without the policy."""
        return (
            *(f"{self.first_token[share]:.2f} s" for share in (50, 95, 99)),
            f"{self.gap * 1e3:.0f} ms",
            f"{self.good / self.minutes:.1f}",
            f"{self.good / self.requests:.1%}",
            *(str(self.ends[end]) for end in ("answered", "left", "refused")),
            str(self.preemptions),
            f"{self.reuse:.1%}",
            *(f"{self.slowdown[kind]:.1f}" for kind in ("chat", "agent", "burst")),
            f"{self.fairness:.2f}",
            str(self.overtaken),
            f"{self.peak:.0%}",
        )


def outcome(setup: Setup, replayed: Replayed) -> Outcome:
    requests = replayed.requests
    answered = [request for request in requests if request.end == "answered"]
    waits = [request.first - request.arrived for request in requests if request.first is not None]
    slowdown = {
        id(request): (request.ended - request.arrived) / request.alone for request in answered
    }
    kinds: tuple[Kind, ...] = ("chat", "agent", "burst")
    speeds = 1 / np.array(list(slowdown.values()) or [1.0])
    return Outcome(
        first_token={share: _percentile(waits, share) for share in (50, 95, 99)},
        gap=_percentile(replayed.gaps, 99),
        good=sum(_good(setup, request) for request in answered),
        requests=len(requests),
        minutes=replayed.seconds / 60,
        ends={
            end: sum(request.end == end for request in requests)
            for end in ("answered", "left", "refused")
        },
        preemptions=replayed.preemptions,
        reuse=sum(request.reused or 0 for request in requests)
        / sum(request.prompt for request in requests),
        slowdown={
            kind: _percentile(
                [slowdown[id(request)] for request in answered if request.kind == kind], 99
            )
            for kind in kinds
        },
        fairness=float(speeds.sum() ** 2 / (len(speeds) * (speeds**2).sum())),
        overtaken=max(request.overtaken for request in requests),
        peak=replayed.peak / setup.limits.room,
    )


def _good(setup: Setup, request: Request) -> bool:
    """Whether the first token and, on average, the others came in time."""
    if request.first is None or request.first - request.arrived > setup.first_token:
        return False
    return request.latest - request.first <= setup.gap * max(request.answer - 1, 1)


def _percentile(values: Sequence[float] | array[float], share: int) -> float:
    """The percentile of some values; NaN if there are none."""
    return float(np.percentile(np.asarray(values), share)) if len(values) else float("nan")
