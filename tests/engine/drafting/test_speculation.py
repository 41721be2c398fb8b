"""With a drafter in the running batch, every row gets the same tokens as without one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from backend.engine.caching import kv
from backend.engine.drafting.batch_drafter import DraftModel, ModelDrafter
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import DraftLength, DraftRequest, LookupDrafter
from backend.engine.model import EngineModel
from backend.engine.planning.draft_width import DraftWidth
from backend.engine.planning.pace import Pace
from backend.engine.planning.plan import Drafted
from backend.engine.request import Sampling
from tests.engine.random_models import VOCABULARY, random_model
from tests.engine.rounds import Rounds, alone, engine_model

pytestmark = pytest.mark.usefixtures("each_order", "guesses_always")
SCHEDULES = 20


@pytest.fixture(autouse=True)
def right(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many guesses of each checked row were right."""
    counts: list[int] = []
    record = DraftLength.record

    def counted(self: DraftLength, proposed: int, accepted: int) -> None:
        counts.append(accepted)
        record(self, proposed, accepted)

    monkeypatch.setattr(DraftLength, "record", counted)
    return counts


@pytest.fixture(scope="module")
def models() -> tuple[EngineModel, EngineModel]:
    model = random_model("full")
    return engine_model(model), engine_model(model, drafting=Drafting(6, lambda: [LookupDrafter()]))


def test_rows_join_and_leave_while_others_get_guesses(
    models: tuple[EngineModel, EngineModel], right: list[int]
) -> None:
    plain, drafting = models
    for seed in range(SCHEDULES):
        dice = random.Random(seed)
        rounds = Rounds(drafting)
        wanted = {}
        for ticket in range(1, 5):
            pattern = [dice.randrange(1, VOCABULARY) for _ in range(dice.randrange(2, 6))]
            request = {
                "sampling": dice.choice(
                    [
                        Sampling(),
                        Sampling(temperature=0.2, seed=ticket),
                        Sampling(temperature=1.0, top_k=2, seed=ticket),
                        Sampling(repetition=1.3),
                        Sampling(logit_bias=((pattern[0], 8.0),)),
                    ]
                ),
                "logprobs": dice.choice([None, None, None, 1]),
                "ignore_eos": dice.random() < 0.3,
                "n_draft": dice.choice([None, None, 0, 1, 3]),
                "stop": dice.choice([(), (f"<{pattern[0]}><{pattern[0]}>",)]),
                "stop_tokens": frozenset(dice.choice([(), (), pattern[:1]])),
                "min_tokens": dice.choice([0, 0, 4]),
            }
            wanted[ticket] = pattern * 4, dice.choice([1, 2, 3, 25, 40]), request
            rounds.submit(ticket, wanted[ticket][0], wanted[ticket][1], **request)
            for _ in range(dice.randrange(15)):
                rounds.step()
        rounds.drain()
        assert not rounds.faults
        for ticket, (prompt, limit, request) in wanted.items():
            expected, received = alone(plain, prompt, limit, **request), rounds.received[ticket]
            assert received.text == expected.text
            assert received.finished is not None
            assert expected.finished is not None
            assert received.finished.reason == expected.finished.reason
            usage = received.finished.usage
            assert usage.completion_tokens == expected.finished.usage.completion_tokens
    assert sum(right) > SCHEDULES, "hardly a guess was right"


def test_a_request_without_drafting_gets_no_guesses_and_is_no_measurement(
    models: tuple[EngineModel, EngineModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafting = models
    prompt = [3, 4, 5] * 6
    expected = alone(plain, prompt, 20).tokens
    guessed: list[tuple[int, ...]] = []
    propose, learn = LookupDrafter.propose, DraftWidth.learn
    learnt: list[int] = []

    def noted(own: LookupDrafter, requests: Sequence[DraftRequest]) -> list[list[int] | None]:
        guessed.append(tuple(one.sequence for one in requests))
        return propose(own, requests)

    def counted(own: DraftWidth, *measured: Any) -> None:
        learnt.append(measured[0])
        learn(own, *measured)

    monkeypatch.setattr(LookupDrafter, "propose", noted)
    monkeypatch.setattr(DraftWidth, "learn", counted)
    rounds = Rounds(drafting)
    rounds.submit(1, prompt, 20, n_draft=0)
    rounds.drain()
    assert rounds.received[1].tokens == expected
    assert not guessed
    assert not learnt
    rounds.submit(2, prompt, 20, n_draft=0)
    rounds.submit(3, prompt, 20)
    rounds.drain()
    assert rounds.received[2].tokens == rounds.received[3].tokens == expected
    assert guessed
    assert all(len(sequences) == 1 for sequences in guessed)


def test_kv_stored_after_guesses_serves_the_next_turn(
    models: tuple[EngineModel, EngineModel],
) -> None:
    plain, drafting = models
    prompt = [3, 4, 5] * 6
    rounds = Rounds(drafting)
    rounds.submit(1, prompt, 30)
    rounds.drain()
    answer = rounds.received[1].tokens
    again = [*prompt, *answer, 7, 8]
    rounds.submit(2, again, 20)
    rounds.drain()
    assert rounds.received[2].tokens == alone(plain, again, 20).tokens
    finished = rounds.received[2].finished
    assert finished is not None
    assert finished.usage.cached_tokens >= len(prompt) + len(answer) - 1


def test_a_cancelled_row_leaves_no_guesses_behind(models: tuple[EngineModel, EngineModel]) -> None:
    plain, drafting = models
    rounds = Rounds(drafting)
    rounds.submit(1, [3, 4, 5] * 6, 200, ignore_eos=True)
    for _ in range(12):
        rounds.step()
    rounds.scheduler.cancel(1)
    rounds.submit(2, [9, 2, 9, 2, 9, 2], 30)
    rounds.drain()
    assert rounds.received[2].tokens == alone(plain, [9, 2, 9, 2, 9, 2], 30).tokens


def test_a_draft_model_is_not_judged_while_it_reads_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = random_model("full")
    draft = DraftModel(network, VOCABULARY, VOCABULARY, 4096)
    drafter = partial(ModelDrafter, draft, Pace(16, 250), 0)
    model = engine_model(network, drafting=Drafting(4, lambda: [drafter()], cost=kv.cost(network)))
    judged: list[tuple[int, int]] = []
    learn = DraftWidth.learn

    def noted(own: DraftWidth, step: Drafted) -> None:
        if step.width:
            judged.append((step.proposed, step.behind))
        learn(own, step)

    monkeypatch.setattr(DraftWidth, "learn", noted)
    rounds = Rounds(model)
    rounds.submit(1, [random.Random(1).randrange(1, VOCABULARY) for _ in range(96)], 24)
    rounds.drain()
    silent = [behind for proposed, behind in judged if not proposed]
    assert silent[:3] == [1, 1, 1]  # chunks of the prompt
    assert any(behind == 0 for proposed, behind in judged if proposed)
