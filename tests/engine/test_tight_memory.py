"""Whatever arrives, ends or is cancelled in little memory, MLX uses no more than the limit.

Schedules are random. The limit is so tight that sequences are preempted, cached prefixes evicted
and passes shortened, and that rows can only be copied one array after the other.
"""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import LookupDrafter
from backend.engine.model import EngineModel
from backend.engine.planning.charges import longest_alone
from backend.engine.planning.plan import PassCost
from tests.engine.kv_models import words
from tests.engine.rounds import MIB, Rounds, engine_model
from tests.engine.test_memory import FORMS, CostOf, memory_model
from tests.engine.test_memory import memory_cost as memory_cost  # a fixture
from tests.long import examples

pytestmark = pytest.mark.usefixtures("each_order", "exact_buffers", "guesses_always")
MOST_ABOVE = 1.02  # of the limit
LONGEST = 560  # tokens of a prompt and its answer
ANSWERS = (1, 4, 20)
PROMPTS = (5, 60, 200, 255, 300, LONGEST - max(ANSWERS))


@dataclass(frozen=True)
class Event:
    """Requests that arrive, a request that is cancelled, and the steps that then run.

    prompts: the lengths of the prompts, each with whether it begins as an earlier one.
    answers: their numbers of tokens.
    cancelled: which request is cancelled, counted from the latest one; 0 means none.
    """

    prompts: list[tuple[int, bool]]
    answers: list[int]
    cancelled: int
    steps: int


EVENTS = st.builds(
    Event,
    st.lists(st.tuples(st.sampled_from(PROMPTS), st.booleans()), max_size=4),
    st.lists(st.sampled_from(ANSWERS), min_size=4, max_size=4),
    st.integers(0, 4),
    st.sampled_from([1, 3, 8, 20]),
)


_model = cache(memory_model)


def _engine(
    form: str, passes: PassCost, spare: float, stored: float, chunk: int, *, drafts: bool
) -> EngineModel:
    """A model whose longest sequence fits alone.

    passes: the cost of its passes.
    spare: the limit, as a multiple of what that sequence needs.
    stored: the share of the limit that cached prefixes may use.
    """
    rest: dict[str, Any] = {"drafting": Drafting(8, lambda: [LookupDrafter()])} if drafts else {}
    engine = engine_model(_model(form), passes=passes, prefill_chunk=chunk, **rest)
    limit = MIB
    while longest_alone(engine.cost, passes, None, limit, LONGEST) < LONGEST:
        limit += MIB // 4
    engine.memory_limit = round(limit * spare)
    engine.prompt_cache_bytes = round(engine.memory_limit * stored)
    return engine


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(9), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    events=st.lists(EVENTS, min_size=2, max_size=6),
    spare=st.sampled_from([1.0, 1.3, 1.8, 2.5]),
    stored=st.sampled_from([0.0, 0.5, 1.0]),
    chunk=st.sampled_from([64, 256]),
    drafts=st.booleans(),
)
def test_no_step_exceeds_the_limit(
    memory_cost: CostOf,
    form: str,
    events: list[Event],
    spare: float,
    stored: float,
    chunk: int,
    drafts: bool,
) -> None:
    engine = _engine(form, memory_cost(form), spare, stored, chunk, drafts=drafts)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.set_memory_limit(before + engine.memory_limit)
    rounds = Rounds(engine)
    prompts: list[list[int]] = []

    def step() -> None:
        mx.synchronize()
        mx.reset_peak_memory()
        rounds.step()
        mx.synchronize()
        peak = mx.get_peak_memory() - before
        assert peak <= MOST_ABOVE * engine.memory_limit, rounds.scheduler.planner._latest

    for event in events:
        for (length, continues), answer in zip(event.prompts, event.answers, strict=False):
            start = prompts[-1][: length // 2] if continues and prompts else []
            # Repeated tokens, so that guesses are found.
            text = [3, 5, 7, 9] * length if drafts else words(length, len(prompts))
            prompts.append([*start, *text][:length])
            rounds.submit(len(prompts), prompts[-1], answer, ignore_eos=True)
        if 0 < event.cancelled <= len(prompts):
            rounds.scheduler.cancel(len(prompts) + 1 - event.cancelled)
        for _ in range(event.steps):
            if rounds.scheduler.busy:
                step()
    while rounds.scheduler.busy:
        step()
    assert not rounds.faults
    assert all(received.error is None for received in rounds.received.values())


def test_the_schedules_are_tight(memory_cost: CostOf) -> None:
    """In such a limit, sequences that would all run together are preempted."""
    dice = random.Random(1)
    engine = _engine("float", memory_cost("float"), 1.3, 0.0, 64, drafts=False)
    rounds = Rounds(engine)
    for ticket in range(1, 9):
        rounds.submit(ticket, words(dice.choice(PROMPTS), ticket), 20, ignore_eos=True)
    rounds.step()
    assert 0 < len(rounds.admitted) < 6
    rounds.drain()
    assert not rounds.faults
