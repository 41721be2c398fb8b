"""The real planner against the cost model of `tests.engine.simulation`, every step checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from backend.engine.planning.plan import (
    DecodeTimed,
    Join,
    PlannerEvent,
    Prefill,
    PrefillTimed,
    Start,
    StepPlan,
)
from backend.engine.planning.planner import Planner
from backend.engine.planning.prefix_index import PrefixKey
from tests.engine.simulation.agreement import MOST_ERROR, agreement
from tests.engine.simulation.device import BrokenPlanError, DeviceSequence, SimulatedDevice
from tests.engine.simulation.outcome import replay
from tests.engine.simulation.replay import Replay
from tests.engine.simulation.setup import Setup, measured, setups
from tests.engine.simulation.traffic import conversations

SETUPS = setups()


def tight(setup: Setup, tokens: int) -> Setup:
    """`setup` with memory for `tokens` tokens of KV, and twice the load."""
    kv = setup.model.cost.of(tokens)
    memory = (setup.model.weights + kv) / setup.machine.usable
    return replace(
        setup, machine=replace(setup.machine, memory=memory), load=2 * setup.load, slots=8
    )


@pytest.mark.parametrize("setup", SETUPS, ids=lambda one: one.model.name)
def test_every_request_ends_and_every_plan_is_valid(setup: Setup) -> None:
    made = replay(setup, requests=150)
    assert sum(made.ends.values()) == 150
    assert made.ends["refused"] == 0
    assert made.ends["answered"] > 100
    assert made.reuse > 0.3


@pytest.mark.parametrize("setup", SETUPS, ids=lambda one: one.model.name)
@pytest.mark.parametrize("seed", range(3))
def test_with_little_memory_no_request_waits_for_ever(setup: Setup, seed: int) -> None:
    made = replay(tight(setup, 24_000), requests=80, seed=seed)
    assert sum(made.ends.values()) == 80
    assert made.ends["answered"] > 20
    assert made.peak <= 1.0


def test_the_same_seed_gives_the_same_outcome() -> None:
    setup = SETUPS[0]
    assert replay(setup, 60, seed=5) == replay(setup, 60, seed=5)
    assert replay(setup, 60, seed=5) != replay(setup, 60, seed=6)


class Careless(Planner):
    """A planner that makes one kind of mistake; `change` names it."""

    change = ""

    def plan(self, now: float, events: Iterable[PlannerEvent]) -> StepPlan:
        plan = super().plan(now, events)
        if self.change == "prefill" and plan.prefill:
            (part, *rest), *groups = plan.prefill
            longer = replace(part, start=part.start + 1)
            return replace(plan, prefill=((longer, *rest), *groups))
        if self.change == "evict" and self._steps == 50:
            return replace(plan, evict=(*plan.evict, 999))
        if self.change == "start":
            return replace(plan, start=())
        if self.change == "decode" and plan.decode:
            return replace(plan, decode={})
        return plan


@pytest.mark.parametrize("change", ["prefill", "evict", "start", "decode"])
def test_an_invalid_plan_is_found(change: str) -> None:
    setup = SETUPS[0]
    policy = Careless(setup.limits)
    policy.change = change
    with pytest.raises(BrokenPlanError):
        Replay(setup, policy, conversations(1, 30, setup.load)).run()


def test_only_the_first_pass_of_a_shape_pays_for_it() -> None:
    """As on CUDA, where the attention of each shape is prepared at its first use."""
    (setup,) = (one for one in SETUPS if one.machine.shape)
    device = SimulatedDevice(setup, setup.limits)
    seconds = []
    for number in range(3):
        prompt = (number,) * (10 if number < 2 else 11)
        device.add(DeviceSequence(number, PrefixKey(prompt), ()))
        start = (Start(number, prompt, None),)
        prefill = ((Prefill(number, 0, len(prompt)),),)
        seconds.append(device.run(StepPlan(number + 1, start=start, prefill=prefill)).seconds)
    assert seconds[0] == pytest.approx(seconds[1] + setup.machine.shape)
    assert seconds[2] == pytest.approx(seconds[0], rel=0.1)


@pytest.mark.parametrize(("name", "simulated", "real"), [*agreement()])
def test_a_modelled_machine_is_as_fast_as_the_real_one(
    name: str, simulated: float, real: float
) -> None:
    """docs/hardware.md has the measurements."""
    assert simulated == pytest.approx(real, rel=MOST_ERROR), name


def test_the_pace_learns_the_times_of_the_modelled_machine() -> None:
    """The simulated device reports what the engine's own clockwork measures on a GPU."""
    (setup,) = (one.setup(4) for one in measured() if one.prefill is not None)
    device = SimulatedDevice(setup, setup.limits)
    prompts = {number: (number,) * 40 for number in range(4)}
    for number, prompt in prompts.items():
        device.add(DeviceSequence(number, PrefixKey(prompt), (7,) * 20))
    start = tuple(Start(number, prompt, None) for number, prompt in prompts.items())
    passes = (*((Prefill(number, 0, 40),) for number in prompts),)
    ran = device.run(StepPlan(1, start=start, prefill=passes))
    reported = [event.seconds for event in ran.events if isinstance(event, PrefillTimed)]
    alone = setup.prefill_seconds(1, 40, 0)
    new = alone + setup.machine.shape
    assert reported == [pytest.approx(one) for one in (new, alone, alone, alone)]
    joins = tuple(Join(number, 1) for number in prompts)
    ran = device.run(StepPlan(2, join=joins, decode={1: 4}))
    ran = device.decode_on(3)
    steps = [event.seconds for event in ran.events if isinstance(event, DecodeTimed)]
    assert steps == [pytest.approx(setup.decode_seconds(4, 41), rel=0.01)] * 3
