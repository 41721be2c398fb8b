"""Prompts that arrive together share few passes where passes cost more than tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from backend.engine.planning.burst import Burst
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
from backend.engine.planning.sequence_state import SequenceState

_LIMITS = Limits(CacheCost(1000, 0), 32, 1 << 40, 0, 0, prefill_chunk=2048, stall_ms=250)
_ANSWER = 20  # tokens


@dataclass
class Machine:
    """Modelled times in seconds: of a pass, of a token, and of the first use of a shape."""

    name: str
    fixed: float
    token: float
    shape: float = 0.0
    shapes: set[tuple[int, int, int]] = field(default_factory=set)

    def __str__(self) -> str:
        return self.name

    def seconds(self, rows: int, width: int, behind: int) -> float:
        shape = rows, width, behind
        new = shape not in self.shapes
        self.shapes.add(shape)
        return self.fixed + rows * width * self.token + new * self.shape


H100 = Machine("H100", 0.008, 1 / 15_000, 0.06)
M4_MAX = Machine("M4 Max", 0.02, 1 / 900)
ZEN_5 = Machine("Zen 5", 0.04, 1 / 1_000)
ZEN_3 = Machine("Zen 3", 0.08, 1 / 400)
BUSY_ZEN_3 = Machine("busy Zen 3", 0.12, 1 / 200)


def warmed(machine: Machine) -> Pace:
    """The pace after the warm-up, whose first passes compile kernels."""
    pace = Pace(_LIMITS.prefill_chunk, _LIMITS.stall_ms)
    for tokens, compiling in ((8, 0.5), (16, 0.5), (64, 0.5), (64, 0.0), (512, 0.0)):
        pace.measured(tokens, machine.seconds(1, tokens, 0) + compiling)
    return pace


@dataclass
class Served:
    """What clients and the device saw.

    rows: of every prefill pass.
    first: seconds from the arrival of each prompt to its first token.
    gaps: seconds between two tokens of a stream, of all streams.
    """

    rows: list[int] = field(default_factory=list)
    first: dict[int, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)


def serve(machine: Machine, arrivals: Sequence[tuple[float, int]]) -> Served:
    """Serve prompts on a modelled machine.

    arrivals: the time and the number of tokens of each prompt, in the order of time.
    """
    planner = Planner(_LIMITS, warmed(machine))
    events: list[PlannerEvent] = []
    left: dict[int, int] = {}
    latest: dict[int, float] = {}
    served = Served()
    number, now = 0, 0.0
    while number < len(arrivals) or planner.busy or events:
        if not (planner.busy or events):
            now = max(now, arrivals[number][0])
        while number < len(arrivals) and arrivals[number][0] <= now:
            length = arrivals[number][1]
            tokens = tuple(range(10_000 * number, 10_000 * number + length))
            events.append(Arrived(number, PrefixKey(tokens), tokens, _ANSWER))
            number += 1
        plan = planner.plan(now, events)
        events = [Started(start.sequence, 0) for start in plan.start]
        left |= {join.sequence: _ANSWER for join in plan.join}
        if plan.decode:
            seconds = machine.fixed + len(left) * machine.token
            now += seconds
            events.append(DecodeTimed(seconds))
        for sequence in [*left] if plan.decode else []:
            events.append(Generated({sequence: (1,)}))
            if sequence in latest:
                served.gaps.append(now - latest[sequence])
            served.first.setdefault(sequence, now - arrivals[sequence][0])
            latest[sequence] = now
            left[sequence] -= 1
            if not left[sequence]:
                del left[sequence]
                events.append(Ended(sequence))
        for group in plan.prefill:
            width = max(part.end - part.start for part in group)
            behind = max(part.start for part in group)
            seconds = machine.seconds(len(group), width, behind)
            now += seconds
            served.rows.append(len(group))
            events += [Prefilled(part.sequence, part.end) for part in group]
            events.append(PrefillTimed(width * len(group), seconds, behind))
        now += 0.001
    return served


def burst(lengths: Sequence[int]) -> list[tuple[float, int]]:
    """Arrivals within 5 ms."""
    dice = random.Random(1)
    return [*zip(sorted(dice.uniform(0, 0.005) for _ in lengths), lengths, strict=True)]


def short_prompts(count: int) -> list[int]:
    dice = random.Random(1)
    return [dice.randint(46, 57) for _ in range(count)]


@pytest.mark.parametrize(("machine", "most"), [(H100, 3), (M4_MAX, 10)], ids=["H100", "M4 Max"])
def test_a_burst_of_short_prompts_takes_few_passes(machine: Machine, most: int) -> None:
    rows = serve(machine, burst(short_prompts(32))).rows
    assert sum(rows) >= 32
    assert len(rows) <= most


def test_the_first_long_prompt_after_a_load_is_not_cut_short() -> None:
    assert serve(H100, burst([512])).rows == [1]


@pytest.mark.parametrize("machine", [H100, M4_MAX, ZEN_5, ZEN_3], ids=str)
@pytest.mark.parametrize("count", [4, 8, 16, 31])
def test_a_burst_on_an_idle_server_is_prefilled_before_its_streams_begin(
    machine: Machine, count: int
) -> None:
    served = serve(machine, burst(short_prompts(count)))
    assert max(served.gaps) < 2 * (machine.fixed + count * machine.token)
    alone = count * 57 * machine.token + 4 * (machine.fixed + 3 * machine.shape)
    assert max(served.first.values()) < alone + 0.1


@pytest.mark.parametrize("spread", [0.01, 0.4, 1.0], ids=lambda spread: f"within {spread} s")
def test_prompts_that_need_too_long_to_be_waited_for_still_share_long_passes(
    spread: float,
) -> None:
    """They need 5.4 s. With the passes that old streams allow, the last would begin after 14 s."""
    served = serve(BUSY_ZEN_3, [(spread * number / 32, 34) for number in range(32)])
    assert max(served.first.values()) < 2 * 32 * 34 * BUSY_ZEN_3.token
    decode = BUSY_ZEN_3.fixed + 32 * BUSY_ZEN_3.token
    assert max(served.gaps) < 6 * 0.25 + decode


def test_streams_wait_for_prompts_but_not_for_the_scoring_of_their_continuations() -> None:
    def prompt(number: int, **changes: Any) -> SequenceState:
        tokens = tuple(range(100 * number, 100 * number + 30))
        return SequenceState(Arrived(number, PrefixKey(tokens), tokens, 20, **changes), 0.0, 1)

    burst = Burst(warmed(ZEN_3))
    stream, scoring = prompt(1), prompt(2, joins=False, scores=True)
    assert burst.interrupts([stream], [scoring], 1.0)
    scoring.filled = scoring.target
    assert not burst.interrupts([stream], [scoring], 1.1)


@pytest.mark.parametrize(
    ("machine", "first", "others"),
    [(ZEN_3, 300, [900] * 10), (M4_MAX, 2000, [2000] * 3)],
    ids=["23 s", "7 s for long prompts"],
)
def test_a_stream_that_has_just_begun_does_not_wait_for_prompts_that_need_too_long(
    machine: Machine, first: int, others: list[int]
) -> None:
    """The first stream is the only one until it ends."""
    begun = machine.fixed + first * machine.token
    served = serve(machine, [(0.0, first), *((begun, length) for length in others)])
    assert max(served.gaps[: _ANSWER - 1]) < 3 * 0.25


def test_a_completed_prompt_waits_for_a_burst_for_a_limited_time() -> None:
    """The others need 9 s, or arrive faster than they can be prefilled."""
    served = serve(ZEN_3, [(0.0, 200)] + [(0.01, 350)] * 10)
    assert served.first[0] < 1.0
    served = serve(ZEN_3, [(0.08 * number, 50) for number in range(31)])
    assert served.first[0] < 5.5


@pytest.mark.parametrize("machine", [ZEN_5, ZEN_3, BUSY_ZEN_3], ids=str)
@pytest.mark.parametrize("early", [1, 2])
def test_prompts_that_arrive_when_the_first_stream_has_begun_are_prefilled_at_once(
    machine: Machine, early: int
) -> None:
    begun = machine.fixed + early * 31 * machine.token + 0.02
    served = serve(machine, [(0.0, 31)] * early + [(begun, 31)] * (8 - early))
    alone = 2 * machine.fixed + 8 * 31 * machine.token
    assert max(served.first.values()) < 1.2 * alone
    long_gaps = [gap for gap in served.gaps if gap > 3 * machine.fixed]
    assert len(long_gaps) == early, "each stream that had begun waits once"


@pytest.mark.parametrize("machine", [H100, M4_MAX, ZEN_5, ZEN_3, BUSY_ZEN_3], ids=str)
def test_a_prompt_that_arrives_during_the_last_pass_of_a_burst_interrupts_no_stream(
    machine: Machine,
) -> None:
    """The completed prompts wait for a short pass rather than for a gap of the same length."""
    second = machine.fixed + machine.shape + 31 * machine.token + 0.001
    served = serve(machine, [(0.0, 31), *[(second / 2, 31)] * 6, (second * 1.1, 31)])
    assert served.rows == [1, 6, 1]
    assert max(served.gaps) < 1.5 * (machine.fixed + 8 * machine.token)


def test_completed_prompts_do_not_wait_while_prompts_keep_arriving() -> None:
    served = serve(H100, [(0.03 * number, 31 + number) for number in range(24)])
    assert max(served.first.values()) < 0.5


def test_a_stream_that_began_long_ago_waits_for_no_burst() -> None:
    served = serve(BUSY_ZEN_3, [(0.0, 31)] + [(1.5, 31)] * 7)
    assert max(served.gaps) < 3 * 0.25


def test_a_prompt_is_completed_in_one_pass_of_two_pauses() -> None:
    served = serve(ZEN_3, [(0.0, 60), (0.0, 60), (2.0, 90)])
    assert served.rows == [2, 1]
    assert max(served.gaps) < 3 * 0.25


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    served = serve(ZEN_5, [(0.0, 50), (0.01, 1200), (0.01, 1200)])
    assert served.first[0] < 0.3


def test_a_newcomer_does_not_wait_for_one_long_prompt() -> None:
    served = serve(ZEN_3, [(0.0, 1200), (0.1, 50)])
    assert served.first[1] < 2.0 < 3.0 < served.first[0]
