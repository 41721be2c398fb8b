"""Prompts that arrive together share few passes where passes cost more than tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from backend.engine.planning.pace import Pace
from backend.engine.planning.plan import (
    Arrived,
    CacheCost,
    DecodeTimed,
    Ended,
    Generated,
    Limits,
    PlannerEvent,
    Prefilled,
    PrefillTimed,
    Started,
)
from backend.engine.planning.planner import Planner
from backend.engine.planning.prefix_index import PrefixKey

_LIMITS = Limits(CacheCost(1000, 0), 32, 1 << 40, 0, 0, prefill_chunk=2048, stall_ms=250)
_ANSWER = 20  # tokens


@dataclass
class Gpu:
    """Modelled times in seconds: of a pass, of a token, and of the first use of a shape."""

    fixed: float
    token: float
    shape: float = 0.0
    shapes: set[tuple[int, int, int]] = field(default_factory=set)

    def seconds(self, rows: int, width: int, behind: int) -> float:
        shape = rows, width, behind
        new = shape not in self.shapes
        self.shapes.add(shape)
        return self.fixed + rows * width * self.token + new * self.shape


H100 = Gpu(0.008, 1 / 15_000, 0.06)
M4_MAX = Gpu(0.02, 1 / 900)


def warmed(gpu: Gpu) -> Pace:
    """The pace after the warm-up, whose first passes compile kernels."""
    pace = Pace(_LIMITS.prefill_chunk, _LIMITS.stall_ms)
    for tokens, compiling in ((8, 0.5), (16, 0.5), (64, 0.5), (64, 0.0), (512, 0.0)):
        pace.measured(tokens, gpu.seconds(1, tokens, 0) + compiling)
    return pace


def passes_of(gpu: Gpu, lengths: list[int]) -> list[int]:
    """The rows of every prefill pass for prompts that arrive within 20 ms."""
    planner = Planner(_LIMITS, warmed(gpu))
    dice = random.Random(1)
    due = sorted(dice.uniform(0, 0.02) for _ in lengths)
    events: list[PlannerEvent] = []
    left: dict[int, int] = {}
    passes: list[int] = []
    number, now = 0, due[0]
    while number < len(lengths) or planner.busy or events:
        while number < len(lengths) and due[number] <= now:
            tokens = tuple(range(1000 * number, 1000 * number + lengths[number]))
            events.append(Arrived(number, PrefixKey(tokens), tokens, _ANSWER))
            number += 1
        plan = planner.plan(now, events)
        events = [Started(start.sequence, 0) for start in plan.start]
        left |= {join.sequence: _ANSWER for join in plan.join}
        if plan.decode:
            now += gpu.fixed
            events.append(DecodeTimed(gpu.fixed))
        for sequence in [*left] if plan.decode else []:
            events.append(Generated({sequence: (1,)}))
            left[sequence] -= 1
            if not left[sequence]:
                del left[sequence]
                events.append(Ended(sequence))
        for group in plan.prefill:
            width = max(part.end - part.start for part in group)
            behind = max(part.start for part in group)
            seconds = gpu.seconds(len(group), width, behind)
            now += seconds
            passes.append(len(group))
            events += [Prefilled(part.sequence, part.end) for part in group]
            events.append(PrefillTimed(width * len(group), seconds, behind))
        now += 0.001
    return passes


@pytest.mark.parametrize(("gpu", "most"), [(H100, 3), (M4_MAX, 10)], ids=["H100", "M4 Max"])
def test_a_burst_of_short_prompts_takes_few_passes(gpu: Gpu, most: int) -> None:
    dice = random.Random(1)
    passes = passes_of(gpu, [dice.randint(46, 57) for _ in range(32)])
    assert sum(passes) >= 32
    assert len(passes) <= most


def test_the_first_long_prompt_after_a_load_is_not_cut_short() -> None:
    assert passes_of(H100, [512]) == [1]
