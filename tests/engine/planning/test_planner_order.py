"""Which prompt is prefilled next: cases that the simulation found."""

from __future__ import annotations

import pytest

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

LONG, SHORT = 60_000, 100


# tokens per second, so that a step has one chunk or many
@pytest.mark.parametrize("speed", [200, 4000])
def test_a_new_prompt_does_not_wait_for_all_of_an_old_one(speed: int) -> None:
    """Both progress: the long prompt gets every other pass, or half of each step."""
    planner = Planner(
        Limits(CacheCost(1, 0), 8, 1 << 40, 1 << 30, 0, prefill_chunk=2048, stall_ms=250)
    )
    events: list[PlannerEvent] = [_arrived(1, LONG)]
    now = 0.0
    filled = {1: 0, 2: 0}
    while 2 in filled and now < LONG / speed:
        if filled[1] > LONG * 9 / 10 and not filled[2] and len(planner.sequences.by_number) == 1:
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


@pytest.mark.parametrize(("length", "most"), [(60_000, 0.6), (780, 1.0), (1_100, 1.5)])
def test_steps_of_a_long_prompt_alone_are_short_because_the_next_prompt_waits(
    length: int, most: float
) -> None:
    """In seconds; what a slightly longer step completes is not cut."""
    speed = 800
    planner = Planner(
        Limits(CacheCost(1, 0), 8, 1 << 40, 1 << 30, 0, prefill_chunk=2048, stall_ms=250)
    )
    events: list[PlannerEvent] = [PrefillTimed(size, size / speed) for size in (16, 128, 1024)]
    events.append(_arrived(1, length))
    steps: list[int] = []
    filled = 0
    while filled < length - 1:
        plan = planner.plan(0.0, events)
        events = [Started(start.sequence, 0) for start in plan.start]
        for (part,) in plan.prefill:
            tokens = part.end - filled
            events += [Prefilled(1, part.end), PrefillTimed(tokens, tokens / speed)]
            steps.append(tokens)
            filled = part.end
    longest = max(steps[:-1] or steps)
    assert 0.6 * most < longest / speed <= most * 1.01


class _Crowd:
    """A device that answers short prompts, whose passes take as long as 32 tokens do.

    waiting: how many prompts wait at any time. passes: prefill passes that were run.
    """

    def __init__(self, waiting: int, length: int, limits: list[int], slots: int = 8) -> None:
        self.planner = Planner(
            Limits(CacheCost(1, 0), slots, 1 << 40, 0, 0, prefill_chunk=2048, stall_ms=250)
        )
        self._waiting, self._length, self._limits = waiting, length, limits
        self._now = 0.0
        self._numbers = 0
        self._events: list[PlannerEvent] = [PrefillTimed(32, 0.16)]
        self.passes = self.ended = self.steps = 0
        self.idle = 0  # slots that were free in a step although a prompt waited

    def step(self) -> None:
        while len(self.planner.sequences.of("waiting")) + self._new() < self._waiting:
            limit = self._limits[self._numbers % len(self._limits)]
            self._numbers += 1
            self._events.append(_arrived(self._numbers, self._length, limit))
        plan = self.planner.plan(self._now, self._events)
        self._events = [Started(start.sequence, 0) for start in plan.start]
        self.steps += 1
        for group in plan.prefill:
            seconds = max(sum(part.end - part.start for part in group), 32) * 0.005
            self._events += [Prefilled(part.sequence, part.end) for part in group]
            self._events.append(PrefillTimed(32, 0.16))
            self._now += seconds
            self.passes += 1
        running = self.planner.sequences.of("decode")
        self.idle += self.planner.limits.slots - len(self.planner.sequences.admitted)
        for one in running:
            self._events.append(Generated({one.number: (1,)}))
            if len(one.generated) + 1 >= one.arrived.limit:
                self._events.append(Ended(one.number))
                self.ended += 1
        if running:
            self._events.append(DecodeTimed(0.14))
            self._now += 0.14

    def _new(self) -> int:
        return sum(isinstance(event, Arrived) for event in self._events)


@pytest.mark.parametrize("limits", [[16], [4, 9, 14, 19, 24], [1, 30]])
def test_short_prompts_that_wait_for_slots_share_their_passes(limits: list[int]) -> None:
    """A slot is left free for as long as that costs less than a separate pass."""
    crowd = _Crowd(8, 8, [2, 4, 6, 8, 10, 12, 14, 16, *limits * 100])
    for _ in range(600):
        crowd.step()
    assert crowd.ended > 100
    assert crowd.passes < 0.6 * crowd.ended


def test_short_prompts_share_a_pass_even_if_one_alone_exceeds_the_stall_limit() -> None:
    """On a busy machine a pass of 8 tokens, or of 32, delays the streams for half a second."""
    planner = Planner(Limits(CacheCost(1, 0), 8, 1 << 40, 0, 0, prefill_chunk=2048, stall_ms=250))
    plan = planner.plan(0.0, [PrefillTimed(32, 0.8), _arrived(1, 8)])
    plan = planner.plan(1.0, [Started(1, 0), Prefilled(1, 8), PrefillTimed(8, 0.5), DecodeTimed(9)])
    arriving = [_arrived(each, 8) for each in range(2, 7)]
    plan = planner.plan(2.0, [Generated({1: (1,) * 5}), *arriving])
    assert sorted(map(len, plan.prefill)) == [4]


@pytest.mark.parametrize(
    ("waiting", "length", "limits"),
    [(1, 8, [16]), (8, 100, [16]), (8, 8, [300, 410, 505])],
    ids=["nobody else waits", "a pass for each is worth it", "no slot is free soon"],
)
def test_otherwise_no_slot_is_left_free(waiting: int, length: int, limits: list[int]) -> None:
    crowd = _Crowd(waiting, length, limits)
    for _ in range(40):  # one arrives in each step
        crowd.step()
    before = crowd.idle
    for _ in range(600):
        crowd.step()
    # The slot of a sequence that ends is still taken in that step; the next plan may use it.
    assert crowd.idle - before <= (crowd.ended if waiting == 1 else 0)


def _arrived(number: int, length: int, limit: int = 512) -> Arrived:
    tokens = [number] * length
    return Arrived(number, PrefixKey(tokens), tokens, limit)
