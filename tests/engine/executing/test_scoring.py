"""Scores equal a reference forward pass, and the prefix is prefilled once for all candidates."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.caching import kv
from backend.engine.executing import scoring
from backend.engine.executing.score_plan import Continuation, ScorePlan
from tests.engine.random_models import CONFIGS, VOCABULARY, random_model
from tests.engine.rounds import MIB, Received, Rounds, alone, engine_model

pytestmark = pytest.mark.usefixtures("each_order")


def _tokens(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1, VOCABULARY) for _ in range(count)]


PREFIX = _tokens(1, 90)
LENGTHS = (1, 17, 3, 40, 0, 2, 9)
PLAN = ScorePlan(
    PREFIX,
    tuple(
        Continuation(tuple(_tokens(2 + at, length)), 2 if length > 10 else 0)
        for at, length in enumerate(LENGTHS)
    ),
)


def _check(model: Any, plan: ScorePlan, received: Received) -> None:
    assert received.finished is not None, received.error
    assert len(received.finished.scores) == len(plan.continuations)
    for one, scored in zip(plan.continuations, received.finished.scores, strict=True):
        assert tuple(entry.token for entry in scored) == one.tokens[one.scored_from :]
        if not scored:
            continue
        whole = [*plan.prefix, *one.tokens]
        logits = model(mx.array([whole]), cache=kv.new_row(model))[0].astype(mx.float32)
        values = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        start = len(plan.prefix) + one.scored_from
        for place, entry in enumerate(scored, start):
            assert abs(values[place - 1, entry.token] - entry.logprob) < 1e-3


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_scores_equal_a_plain_pass_and_other_rows_keep_their_tokens(
    kind: str, batches: bool
) -> None:
    model = random_model(kind)
    engine = engine_model(model, batches=batches)
    expected = alone(engine, [4, 5, 6], 40, ignore_eos=True).text
    rounds = Rounds(engine)
    rounds.submit(1, [4, 5, 6], 40, ignore_eos=True)
    rounds.step()
    for ticket in (2, 3):
        rounds.score(ticket, PLAN)
    rounds.drain()
    assert rounds.received[1].text == expected
    for ticket in (2, 3):
        _check(model, PLAN, rounds.received[ticket])
    assert not rounds.faults


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_prefix_is_prefilled_once_and_its_stable_part_is_cached(kind: str) -> None:
    rounds = Rounds(engine_model(random_model(kind)))
    plan = ScorePlan(PREFIX, PLAN.continuations, stable=70)
    rounds.score(1, plan)
    rounds.drain()
    fed = sum(max(length - 1, 0) for length in LENGTHS)
    assert rounds.gauges.prompt_tokens_processed == len(PREFIX) + fed
    other = ScorePlan(PREFIX[:70] + _tokens(99, 20), PLAN.continuations, stable=70)
    rounds.score(2, other)
    rounds.drain()
    assert rounds.gauges.prompt_tokens_processed == 2 * (len(PREFIX) + fed) - 70
    for ticket, scored in ((1, plan), (2, other)):
        _check(random_model(kind), scored, rounds.received[ticket])


def test_running_rows_get_a_token_in_every_round_of_scoring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "_MOST_LOGITS", 16 * VOCABULARY)
    rounds = Rounds(engine_model(random_model("full")))
    rounds.submit(1, [1, 2, 3], 1000, ignore_eos=True)
    while len(rounds.received[1].tokens) < 2:
        rounds.step()
    rounds.score(2, PLAN)
    while rounds.received[2].finished is None:
        before = len(rounds.received[1].tokens)
        rounds.step()
        assert len(rounds.received[1].tokens) == before + 1
    assert len(rounds.received[1].tokens) > 5
    _check(random_model("full"), PLAN, rounds.received[2])


def test_it_can_be_cancelled_at_any_step() -> None:
    for steps in range(12):
        rounds = Rounds(engine_model(random_model("full")))
        rounds.score(1, PLAN)
        for _ in range(steps):
            rounds.step()
        rounds.scheduler.cancel(1)
        rounds.score(2, PLAN)
        rounds.drain()
        _check(random_model("full"), PLAN, rounds.received[2])


def test_little_memory_makes_it_narrower_and_none_refuses_it() -> None:
    model = random_model("full")
    longest = kv.cost(model).of(len(PREFIX) + max(LENGTHS))
    rounds = Rounds(engine_model(model, memory_limit=4 * longest))
    rounds.score(1, PLAN)
    rounds.step()
    assert [one.width for one in rounds.scheduler.planner.sequences.of("prefill")] == [1 + 2]
    rounds.drain()
    _check(model, PLAN, rounds.received[1])
    rounds = Rounds(engine_model(model, memory_limit=longest))
    rounds.score(1, PLAN)
    rounds.drain()
    assert "limit" in str(rounds.received[1].error)
    assert 4 * longest < MIB


def test_a_preempted_score_starts_again() -> None:
    model = random_model("full")
    rounds = Rounds(engine_model(model))
    rounds.submit(2, [1, 2, 3], 200, ignore_eos=True)
    while not rounds.received[2].text:
        rounds.step()
    rounds.score(1, PLAN)
    rounds.step()
    while rounds.scheduler.planner.sequences.admitted[1].filled < len(PREFIX) - 1:
        rounds.step()
    rounds.step()
    limits = rounds.scheduler.planner.limits
    rounds.scheduler.planner.limits = replace(limits, budget=kv.cost(model).of(300))
    rounds.step()
    rounds.scheduler.planner.limits = limits
    rounds.drain()
    assert rounds.scheduler.planner.preemptions == 1
    _check(model, PLAN, rounds.received[1])
