"""The arithmetic of drafting with a prediction head, against the mean of many random steps."""

from __future__ import annotations

import random

import pytest

from bench.simulation import draft_speed
from bench.simulation.draft_speed import ROWS, fed_again, gain, step_seconds, tokens
from bench.simulation.setup import Draft, drafts

STEPS = 20_000


@pytest.mark.parametrize("width", [1, 2, 3])
def test_expected_tokens_are_those_of_many_steps(width: int) -> None:
    draft, dice = drafts()[0], random.Random(width)
    made = again = 0
    for _ in range(STEPS):
        drawn = dice.random()  # as many guesses are right as shares are above it
        right = sum(drawn < share for share in draft.right[:width])
        made += 1 + right
        again += 1 + right if right < width else 0
    assert made / STEPS == pytest.approx(tokens(draft, width), rel=0.02)
    assert again / STEPS == pytest.approx(fed_again(draft, width), rel=0.03)


@pytest.mark.parametrize("draft", drafts(), ids=lambda draft: draft.setup.name)
def test_no_guesses_gain_nothing_and_wider_steps_take_longer(draft: Draft) -> None:
    for rows in ROWS:
        assert gain(draft, rows, 0) == 1
        seconds = [step_seconds(draft, rows, width) for width in range(len(draft.right) + 1)]
        assert seconds == sorted(seconds)


def test_a_table_for_each_model_and_machine() -> None:
    assert len(list(draft_speed.tables())) == len(drafts()) == 4
