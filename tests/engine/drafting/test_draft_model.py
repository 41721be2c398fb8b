"""A draft model follows its sequences through pauses and wrong guesses, and never delays them."""

from __future__ import annotations

import random
from typing import Any, cast

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.drafting.batch_drafter import ModelDrafter
from backend.engine.drafting.drafter import DraftRequest
from backend.engine.planning.pace import Pace
from tests.engine.drafting.tiny import VOCABULARY, draft_model, load, prompts

SOME_TEXT = [20 + 7 * at % 200 for at in range(40)]


class Watched:
    """A model that records how many tokens it gets in each pass."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = model.layers
        self.fed: list[int] = []

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.fed.append(tokens.shape[1])
        logits: mx.array = self.model(tokens, cache=cache)
        return logits


def watched(pace: Pace, **changes: Any) -> tuple[ModelDrafter, Watched]:
    model = Watched(load("tiny_draft")[0])
    return ModelDrafter(draft_model(model, **changes), pace, least_probability=0), model


def guesses(drafter: ModelDrafter, tokens: list[int], most: int) -> list[int] | None:
    (found,) = drafter.propose([DraftRequest(1, tokens, most)])
    return found


def best_of(tokens: list[int], count: int) -> list[int]:
    """The draft model's greedy tokens for one sequence, each computed from scratch."""
    model = draft_model().model
    found: list[int] = []
    for _ in range(count):
        logits = model(mx.array([tokens + found]), cache=kv.new_row(model))
        found.append(cast(int, mx.argmax(logits[0, -1]).item()))
    return found


def test_guesses_are_the_draft_models_own_whatever_happened_to_earlier_ones() -> None:
    """Sequences start, end, get no guesses for a while, and differ in how many are right."""
    drafter = ModelDrafter(draft_model(), Pace(24, 250), least_probability=0)
    dice = random.Random(1)
    texts: dict[int, list[int]] = {}
    checked = together = 0
    for step in range(40):
        if len(texts) < 4 and dice.random() < 0.3:
            texts[step] = [dice.randrange(VOCABULARY) for _ in range(dice.choice([1, 9, 70]))]
        if texts and dice.random() < 0.1:
            gone = dice.choice(list(texts))
            del texts[gone]
            drafter.forget([gone])
        wanted = [number for number in texts if dice.random() < 0.8]
        asked = [DraftRequest(number, texts[number], dice.randint(1, 4)) for number in wanted]
        found = drafter.propose(asked)
        together += sum(own is not None for own in found) > 1
        for one, own in zip(asked, found, strict=True):
            right = 0
            if own is not None:
                assert own == best_of(texts[one.sequence], one.most)
                right = dice.randint(0, len(own))
                texts[one.sequence] = texts[one.sequence] + own[:right]
                checked += 1
        for number in texts:
            more = dice.choice([1, 1, 1, 40])  # steps in which no guesses were requested
            texts[number] = texts[number] + [dice.randrange(VOCABULARY) for _ in range(more)]
    assert checked > 20
    assert together > 5


def test_the_same_sequence_gets_the_same_guesses() -> None:
    drafter = ModelDrafter(draft_model(), Pace(512, 250), least_probability=0)
    tokens = prompts(1)[0]
    guesses(drafter, tokens, 4)
    assert guesses(drafter, tokens, 4) == guesses(drafter, tokens, 4) == best_of(tokens, 4)


def test_it_makes_no_guess_if_it_is_not_confident() -> None:
    tokens = [random.Random(2).randrange(20, VOCABULARY) for _ in range(40)]
    careful, bold = (ModelDrafter(draft_model(), Pace(512, 250), least) for least in (0.99, 0))
    assert guesses(careful, tokens, 4) == []
    assert guesses(bold, tokens, 4)


def test_long_prompts_are_prefilled_in_limited_chunks_one_per_call() -> None:
    drafter, model = watched(Pace(most_tokens=32, stall_ms=250))
    first = [1 + at % 300 for at in range(203)]
    second = [2 + at % 300 for at in range(100)]
    answered: set[int] = set()
    while len(answered) < 2:
        model.fed.clear()
        found = drafter.propose([DraftRequest(1, first, 2), DraftRequest(2, second, 2)])
        assert max(model.fed) <= 32
        assert sum(model.fed) <= 2 * 32 + 2
        answered |= {at for at, own in enumerate(found) if own}
        first.append(7)
        second.append(7)


def test_after_a_pause_it_computes_only_the_missing_tokens() -> None:
    drafter, model = watched(Pace(512, 250))
    tokens = list(SOME_TEXT)
    guesses(drafter, tokens, 1)
    tokens += [5, 6, 7, 8]
    model.fed.clear()
    assert guesses(drafter, tokens, 1)
    assert model.fed == [4]


def test_no_guess_passes_the_draft_models_context() -> None:
    drafter, model = watched(Pace(512, 250), longest=42)
    assert len(guesses(drafter, SOME_TEXT, 8) or []) == 2
    model.fed.clear()
    assert guesses(drafter, [*SOME_TEXT, 1, 2], 8) == []
    assert model.fed == []
    assert drafter.nbytes == 0


def test_no_guess_is_beyond_the_main_models_vocabulary() -> None:
    tokens = prompts(1)[0]
    guess = best_of(tokens, 1)[0]
    drafter, _ = watched(Pace(512, 250), main_vocabulary=guess)
    assert max(guesses(drafter, tokens, 4) or []) < guess


def test_a_token_that_the_draft_model_does_not_have_ends_guessing() -> None:
    drafter, model = watched(Pace(512, 250))
    assert guesses(drafter, [*SOME_TEXT, VOCABULARY], 4) == []
    assert guesses(drafter, [*SOME_TEXT, VOCABULARY, 1], 4) == []
    assert model.fed == []
