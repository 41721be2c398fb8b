"""Whose turn it is in prefill: found by the simulation, one case each."""

from __future__ import annotations

import pytest

from backend.engine.plan import (
    Arrived,
    CacheCost,
    Limits,
    PlannerEvent,
    Prefilled,
    PrefillTimed,
    Started,
)
from backend.engine.planner import Planner
from backend.engine.prefix_index import PrefixKey

LONG, SHORT = 60_000, 100


@pytest.mark.parametrize("speed", [200, 4000])  # tokens per second: one, or many, chunks a step
def test_a_newcomer_does_not_wait_for_the_whole_of_an_aged_prompt(speed: int) -> None:
    """Both get on: the long prompt with every other pass, or half of each step."""
    planner = Planner(
        Limits(CacheCost(1, 0), 8, 1 << 40, 1 << 30, 0, prefill_chunk=2048, stall_ms=250)
    )
    events: list[PlannerEvent] = [_arrived(1, LONG)]
    now = 0.0
    filled = {1: 0, 2: 0}
    while 2 in filled and now < LONG / speed:
        if filled[1] > LONG * 9 / 10 and not filled[2] and len(planner.sequences) == 1:
            events.append(_arrived(2, SHORT))
            begun, before = now, filled[1]
        plan = planner.plan(now, events)
        events = [Started(start.sequence, 0) for start in plan.start]
        for group in plan.prefill:
            tokens = sum(part.end - part.start for part in group)
            events += [Prefilled(part.sequence, part.end) for part in group]
            events.append(PrefillTimed(tokens, tokens / speed))
            now += tokens / speed
            filled |= {part.sequence: part.end for part in group}
        if filled[2] >= SHORT:
            break
    assert filled[2] == SHORT
    assert now - begun < 4.0 * max(SHORT / speed, 1.0)
    assert before < filled[1] < LONG - 1


def _arrived(number: int, length: int) -> Arrived:
    tokens = [number] * length
    return Arrived(number, PrefixKey(tokens), tokens, limit=512)
