"""Trained models answer the same with and without guesses, and most guesses are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from backend.engine.caching import kv
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import Drafter, DraftLength, LookupDrafter
from backend.engine.request import Sampling
from tests.engine.drafting.tiny import draft_model, model_drafter, prompts, text_model
from tests.engine.rounds import Rounds, engine_model
from tests.long import TEST_LONG

pytestmark = pytest.mark.usefixtures("each_order", "guesses_always")
COUNT, LENGTH = (12, 40) if TEST_LONG else (5, 24)
GUESSERS: dict[str, list[Callable[[], Drafter]]] = {
    "lookup": [LookupDrafter],
    "model": [model_drafter],
    "both": [LookupDrafter, model_drafter],
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("names", "share"), [("lookup", 0.3), ("model", 0.6), ("both", 0.4)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_with_guesses(
    names: str, share: float, temperature: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [0, 0]

    def record(self: DraftLength, proposed: int, accepted: int) -> None:
        counts[0] += proposed
        counts[1] += accepted
        original(self, proposed, accepted)

    original = DraftLength.record
    monkeypatch.setattr(DraftLength, "record", record)
    cost = kv.cost(draft_model().model) if names != "lookup" else None
    drafting = Drafting(8, lambda: [make() for make in GUESSERS[names]], cost=cost)
    assert answers(temperature, rows, drafting) == plain(temperature)
    assert counts[1] > COUNT
    assert counts[1] > share * counts[0]


@cache
def plain(temperature: float) -> list[list[int]]:
    return answers(temperature, 4, None)


def answers(temperature: float, rows: int, drafting: Drafting | None) -> list[list[int]]:
    rounds = Rounds(engine_model(text_model()[0], drafting=drafting, slots=rows))
    for at, prompt in enumerate(prompts(COUNT)):
        sampling = Sampling(temperature=temperature, top_p=0.95, top_k=40, seed=at)
        rounds.submit(at, prompt, LENGTH, sampling=sampling, ignore_eos=True)
    rounds.drain()
    assert not rounds.faults
    return [rounds.received[at].tokens for at in range(COUNT)]
