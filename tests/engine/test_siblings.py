"""A prefix shared by prompts that arrive together is prefilled once, and no answer changes."""

from __future__ import annotations

import pytest

from backend.engine.request import Sampling
from tests.engine.random_models import CONFIGS, VOCABULARY, random_model
from tests.engine.rounds import Rounds, alone, engine_model

pytestmark = pytest.mark.usefixtures("each_order")

PROMPT = [(place * place + 5 * place) % (VOCABULARY - 1) + 1 for place in range(300)]
DRAWN = [Sampling(temperature=1.0, seed=seed) for seed in range(8)]


@pytest.mark.parametrize("slots", [8, 3])
@pytest.mark.parametrize("kind", CONFIGS)
def test_eight_equal_prompts_are_prefilled_once(kind: str, slots: int) -> None:
    engine = engine_model(random_model(kind), slots=slots)
    rounds = Rounds(engine)
    for ticket, sampling in enumerate(DRAWN):
        rounds.submit(ticket, PROMPT, 12, sampling=sampling, ignore_eos=True)
    rounds.drain()
    assert rounds.gauges.prompt_tokens_processed == len(PROMPT) + 7
    reused = []
    for ticket, sampling in enumerate(DRAWN):
        received = rounds.received[ticket]
        assert received.text == alone(engine, PROMPT, 12, sampling=sampling, ignore_eos=True).text
        assert received.finished is not None
        reused.append(received.finished.usage.cached_tokens)
    assert reused == [0] + 7 * [len(PROMPT) - 1]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_common_prefix_is_prefilled_once(kind: str) -> None:
    engine = engine_model(random_model(kind), slots=8)
    rounds = Rounds(engine)
    prompts = [[*PROMPT[:200], ticket + 1, *PROMPT[ticket : ticket + 40]] for ticket in range(6)]
    for ticket, prompt in enumerate(prompts):
        rounds.submit(ticket, prompt, 5, ignore_eos=True)
    rounds.drain()
    assert rounds.gauges.prompt_tokens_processed == 200 + 6 * 41
    for ticket, prompt in enumerate(prompts):
        assert rounds.received[ticket].text == alone(engine, prompt, 5, ignore_eos=True).text


def test_a_prompt_starts_from_a_sequence_that_is_being_prefilled() -> None:
    engine = engine_model(random_model("full"))
    rounds = Rounds(engine)
    rounds.submit(1, [9], 400, ignore_eos=True)
    rounds.step()
    rounds.submit(2, PROMPT, 5, ignore_eos=True)
    while not any(one.filled > 100 for one in rounds.scheduler.planner.sequences.of("prefill")):
        rounds.step()
    rounds.submit(3, [*PROMPT[:90], 7, 7, 7], 5, ignore_eos=True)
    rounds.step()
    assert rounds.received[2].text == ""
    rounds.drain()
    for ticket, prompt, reused in ((2, PROMPT, 0), (3, [*PROMPT[:90], 7, 7, 7], 90)):
        received = rounds.received[ticket]
        assert received.text == alone(engine, prompt, 5, ignore_eos=True).text
        assert received.finished is not None
        assert received.finished.usage.cached_tokens == reused


def test_a_prompt_whose_source_is_cancelled_is_prefilled_itself() -> None:
    rounds = Rounds(engine_model(random_model("full")))
    for ticket in (1, 2, 3):
        rounds.submit(ticket, PROMPT, 5, ignore_eos=True)
    rounds.step()
    assert rounds.tickets("prefill") == [1]
    rounds.scheduler.cancel(1)
    rounds.step()
    rounds.step()
    assert rounds.tickets("prefill") == [2]
    rounds.drain()
    assert rounds.received[2].finished
    assert rounds.received[3].finished


def test_a_prompt_that_waits_for_another_keeps_its_place_and_blocks_nobody() -> None:
    rounds = Rounds(engine_model(random_model("full"), slots=3))
    rounds.submit(1, PROMPT, 400, ignore_eos=True)
    rounds.submit(2, PROMPT, 400, ignore_eos=True)
    rounds.step()
    rounds.submit(3, [5, 6, 7], 400, ignore_eos=True)
    rounds.step()
    rounds.submit(4, [*PROMPT[::-1], *PROMPT], 400, ignore_eos=True)
    rounds.step()
    assert rounds.tickets("waiting") == [2, 4]
    assert sorted(rounds.admitted) == [1, 3]
    while not rounds.received[2].text:
        rounds.step()
    assert rounds.tickets("waiting") == [4]
    assert sorted(rounds.admitted) == [1, 2, 3]


def test_without_a_prefix_cache_no_prompt_waits_for_another() -> None:
    rounds = Rounds(engine_model(random_model("full"), prompt_cache_bytes=0))
    for ticket in (1, 2):
        rounds.submit(ticket, PROMPT, 5, ignore_eos=True)
    rounds.step()
    assert len(rounds.tickets("prefill")) == 2
    rounds.drain()
