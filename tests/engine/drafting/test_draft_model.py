"""A draft model follows its sequence through pauses and wrong guesses, and never stalls it."""

from __future__ import annotations

import random
from typing import Any, cast

import mlx.core as mx
import pytest

from backend.engine import kv
from backend.engine.drafting.draft_model import ModelDrafter
from backend.engine.prefill import Pace
from backend.engine.request import Sampling
from tests.engine.drafting.rows import RowSampler, decode, prefilled
from tests.engine.drafting.tiny import (
    VOCABULARY,
    draft_model,
    load,
    prompts,
    text_model,
)

SOME_TEXT = [20 + 7 * at % 200 for at in range(40)]


@pytest.fixture(autouse=True)
def _no_compiler() -> None:
    mx.disable_compile()


class Watched:
    """A model that notes how many tokens it is fed at a time."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = model.layers
        self.fed: list[int] = []

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.fed.append(tokens.shape[1])
        logits: mx.array = self.model(tokens, cache=cache)
        return logits


class Broken(Watched):
    """A model that fails."""

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        raise RuntimeError("out of memory")


def watched(pace: Pace, **changes: Any) -> tuple[ModelDrafter, Watched]:
    model = Watched(load("tiny_draft")[0])
    return ModelDrafter(draft_model(model, **changes), pace, least_probability=0), model


def best_of(tokens: list[int], count: int) -> list[int]:
    """What the draft model says alone, computed anew for each token."""
    model = draft_model().model
    found: list[int] = []
    for _ in range(count):
        logits = model(mx.array([tokens + found]), cache=kv.new_row(model))
        found.append(cast(int, mx.argmax(logits[0, -1]).item()))
    return found


def test_guesses_are_the_draft_models_own_whatever_became_of_those_before() -> None:
    drafter = ModelDrafter(draft_model(), Pace(512, 250), least_probability=0)
    tokens = list(SOME_TEXT)
    dice = random.Random(1)
    for _ in range(40):
        guesses = drafter.propose(tokens, 4)
        if guesses:
            assert guesses == best_of(tokens, len(guesses))
            right = dice.randint(0, len(guesses))
            drafter.record(len(guesses), max(right, 1))  # so that it never rests
            tokens = tokens + guesses[:right]
        tokens.append(dice.randrange(VOCABULARY))
        for _ in range(dice.choice([0, 0, 3])):  # steps that nobody asked guesses for
            tokens.append(dice.randrange(VOCABULARY))


def test_the_same_question_has_the_same_answer() -> None:
    drafter = ModelDrafter(draft_model(), Pace(512, 250), least_probability=0)
    tokens = prompts(1)[0]
    assert drafter.propose(tokens, 4) == drafter.propose(tokens, 4) != []


def test_it_is_silent_where_it_is_not_sure() -> None:
    tokens = [random.Random(2).randrange(20, VOCABULARY) for _ in range(40)]
    careful, bold = (ModelDrafter(draft_model(), Pace(512, 250), least) for least in (0.99, 0))
    assert careful.propose(tokens, 4) == []
    assert bold.propose(tokens, 4) != []


def test_a_long_prompt_is_read_in_bounded_chunks() -> None:
    drafter, model = watched(Pace(most_tokens=32, stall_ms=250))
    tokens = [1 + at % 300 for at in range(203)]
    calls = 0
    while not drafter.propose(tokens, 2):
        calls += 1
        tokens.append(7)
        assert len(model.fed) == calls, "one chunk in a call"
    assert calls == 203 // 31
    assert max(model.fed) <= 32
    assert sum(model.fed[: calls + 1]) == len(tokens)


def test_after_a_rest_it_feeds_only_what_is_missing() -> None:
    drafter, model = watched(Pace(512, 250))
    tokens = list(SOME_TEXT)
    for _ in range(2):
        proposed = drafter.propose(tokens, 1)
        drafter.record(len(proposed), 0)
        tokens.append((proposed[0] + 1) % VOCABULARY)
    assert not drafter.ready(len(tokens))
    assert drafter.propose(tokens, 4) == []
    tokens += [5, 6, 7, 8]
    model.fed.clear()
    assert drafter.ready(len(tokens))
    assert drafter.propose(tokens, 1)
    assert model.fed == [5]


def test_no_guess_passes_the_draft_models_context() -> None:
    tokens = SOME_TEXT
    drafter, model = watched(Pace(512, 250), longest=42)
    assert len(drafter.propose(tokens, 8)) == 2
    assert drafter.ready(41)
    assert not drafter.ready(42)
    model.fed.clear()
    assert drafter.propose([*tokens, 1, 2], 8) == []
    assert model.fed == []


def test_no_guess_is_beyond_the_vocabulary_of_the_main_model() -> None:
    tokens = prompts(1)[0]
    guess = best_of(tokens, 1)[0]
    drafter, _ = watched(Pace(512, 250), main_vocabulary=guess)
    assert max(drafter.propose(tokens, 4)) < guess


def test_a_token_that_the_draft_model_does_not_have_ends_guessing() -> None:
    tokens = SOME_TEXT
    drafter, model = watched(Pace(512, 250))
    assert drafter.propose([*tokens, VOCABULARY], 4) == []
    assert model.fed == []
    assert not drafter.ready(1000)
    assert drafter.propose([*tokens, 1], 4) == []


def test_a_fault_ends_guessing_and_nothing_else() -> None:
    drafter = ModelDrafter(draft_model(Broken(load("tiny_draft")[0])), Pace(512, 250))
    assert drafter.propose([1, 2, 3], 4) == []
    assert not drafter.ready(4)


def test_a_drafter_that_is_asked_at_random_changes_no_token() -> None:
    """While other sequences are in the batch nobody asks the drafter, for any number of steps."""
    model, prompt = text_model()[0], prompts(3)[2]
    sampler = RowSampler(Sampling(temperature=0.7, seed=5), VOCABULARY)

    class Parked(ModelDrafter):
        dice = random.Random(3)

        def ready(self, length: int) -> bool:
            return self.dice.random() < 0.4 and super().ready(length)

    cache = prefilled(model, prompt)
    plain, _ = decode(model, cache, prompt, 120, sampler)
    cache = prefilled(model, prompt)
    drafter = Parked(draft_model(), Pace(512, 250))
    found, tally = decode(model, cache, prompt, 120, sampler, drafter)
    assert found == plain
    assert tally.accepted > 10
