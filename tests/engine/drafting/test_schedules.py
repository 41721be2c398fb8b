"""Guesses change no token, whatever the batch and however many guesses are right.

The schedules are those of `test_parity`: rows join and leave, are preempted, constrained,
penalised. For each row a random number of guesses is made, of which a random number is right.
`make test` plays two schedules with each model, `make test-long` forty; GUESS_SCHEDULES sets
another number.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from backend.engine.drafting import drafter
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import DraftRequest
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.executing.speculation import Speculation
from backend.engine.planning.draft_width import DraftWidth
from tests.architectures.vlm_shapes import VLM_ARCHITECTURES, tiny_vlm_model
from tests.engine.kv_models import kv_model
from tests.engine.random_models import VOCABULARY
from tests.engine.rounds import engine_model
from tests.engine.test_parity import HEAVY, check_schedule
from tests.long import TEST_LONG

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("small_grammars")]
# Of the first four schedules, the last two have the most guesses.
SCHEDULES = int(os.environ.get("GUESS_SCHEDULES", "40" if TEST_LONG else "4"))
SEEDS = range(0 if SCHEDULES > 4 else 2, SCHEDULES)
KINDS = (
    "attention",
    "window",
    "latent",
    "quantised",
    "short convolution",
    "state space",
    "gated delta",
    "convolved attention",
    # Models of mlx-vlm: their own masks would include positions of wrong guesses.
    "qwen3_5_text",
    "inkling",
)


class Seer:
    """A guesser that knows the answers and guesses wrong from a random position on."""

    nbytes = 0

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.answers: list[list[int]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int] | None]:
        return [self.guesses(list(one.tokens), one.most) for one in requests]

    def forget(self, sequences: Collection[int]) -> None:
        """Do nothing: the answers stay known."""

    def guesses(self, tokens: list[int], most: int) -> list[int] | None:
        length = len(tokens)
        known = [answer for answer in self.answers if answer[:length] == tokens]
        if self.dice.random() < 0.2 or not known:  # its answer ended with an earlier token
            return None
        right = self.dice.randrange(most + 1)
        guesses = self.dice.choice(known)[length:][:right]
        wrong = self.dice.randrange(most + 1 - len(guesses))
        return [*guesses, *(self.dice.randrange(VOCABULARY) for _ in range(wrong))]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many guesses were right and wrong; the width of a step is random."""
    dice = random.Random(7)
    seen: Counter[str] = Counter()

    def record(self: Speculation, one: ExecutorSequence, proposed: int, accepted: int) -> None:
        assert 0 <= accepted <= proposed
        seen["right"] += accepted
        seen["wrong"] += proposed - accepted

    monkeypatch.setattr(Speculation, "record", record)

    def choose(self: DraftWidth, rows: int, longest: int, most: int) -> int:
        return dice.choice([0, most // 2, most, most])

    monkeypatch.setattr(DraftWidth, "choose", choose)
    monkeypatch.setattr(drafter, "_FIRST_LENGTH", 6)
    return seen


def _network(kind: str) -> Any:
    return tiny_vlm_model(kind) if kind in VLM_ARCHITECTURES else kv_model(kind)


@pytest.mark.usefixtures("counted_clock")  # which rows draft depends on the time of steps
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_gets_the_same_tokens_as_without_guesses(
    kind: str, recorded: Counter[str]
) -> None:
    network = _network(kind)
    plain = engine_model(network, slots=8)
    for seed in SEEDS:
        seer = Seer(seed)
        drafting = Drafting(6, lambda seer=seer: [seer])  # type: ignore[misc]
        model = engine_model(network, slots=8, drafting=drafting, **(HEAVY if seed % 2 else {}))
        check_schedule(model, seed, plain, seer.answers.append)
    assert recorded["right"] > 5 * len(SEEDS)
    assert recorded["wrong"] > 5 * len(SEEDS)
