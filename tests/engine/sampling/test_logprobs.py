"""Log-probabilities of tokens equal those of a reference forward pass over the same tokens."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.engine import device
from backend.engine.caching import kv
from backend.engine.events import TokenLogprob
from backend.engine.executing import scoring
from backend.engine.request import Sampling
from backend.engine.sampling.logprobs import BatchLogprobs
from tests.engine.random_models import CONFIGS, VOCABULARY, random_model
from tests.engine.rounds import Rounds, alone, engine_model

PROMPT = list(range(1, 20))
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.5, seed=3),
    Sampling(temperature=0.8, top_k=5, seed=1, repetition=1.4, presence=0.5),
    Sampling(logit_bias=((7, 30.0),)),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("full")


def _plain(model: Any, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of every next token at every position, [tokens, vocabulary]."""
    logits = model(mx.array([tokens]), cache=kv.new_row(model))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def _check(model: Any, prompt: list[int], tokens: list[int], sampled: Any, count: int) -> None:
    assert sampled is not None
    assert [entry.token for entry in sampled] == tokens
    expected = _plain(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
    for entry, values in zip(sampled, expected, strict=True):
        assert abs(entry.logprob - values[entry.token]) < 1e-3
        assert len(entry.top) == count
        best = np.sort(values)[::-1][:count]
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-3)
        assert all(abs(values[token] - value) < 1e-3 for token, value in entry.top)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_they_do_not_depend_on_the_sampling_settings(model: Any, sampling: Sampling) -> None:
    received = alone(engine_model(model), PROMPT, 12, sampling=sampling, logprobs=4)
    assert received.finished is not None
    _check(model, PROMPT, received.tokens, received.finished.logprobs, 4)


def test_they_are_the_same_in_a_changing_batch(model: Any) -> None:
    dice = random.Random(5)
    engine = engine_model(model)
    for _ in range(6):
        rounds = Rounds(engine)
        wanted: dict[int, int | None] = {}
        prompts: dict[int, list[int]] = {}
        for ticket in range(1, 9):
            prompts[ticket] = [dice.randrange(1, VOCABULARY) for _ in range(dice.randrange(1, 40))]
            wanted[ticket] = dice.choice([None, 0, 1, 5])
            rounds.submit(
                ticket,
                prompts[ticket],
                dice.randrange(1, 15),
                sampling=dice.choice(SAMPLINGS),
                logprobs=wanted[ticket],
            )
            for _ in range(dice.randrange(4)):
                rounds.step()
        rounds.drain()
        for ticket, count in wanted.items():
            received = rounds.received[ticket]
            assert received.finished is not None
            if count is None:
                assert received.finished.logprobs is None
            else:
                _check(model, prompts[ticket], received.tokens, received.finished.logprobs, count)


def test_probabilities_of_the_whole_vocabulary_add_up_to_one() -> None:
    logits = mx.array(np.random.default_rng(0).normal(0, 5, (3, 20)).astype(np.float32))
    logprobs = BatchLogprobs([20, None, 20])
    sampled = logprobs(logits, mx.array([4, 5, 6]))
    for at, entry in logprobs.read(sampled, [4, 5, 6]).items():
        assert len(entry.top) == 20
        assert sum(np.exp(value) for _, value in entry.top) == pytest.approx(1, abs=1e-5)
        assert entry == TokenLogprob((4, 5, 6)[at], dict(entry.top)[(4, 5, 6)[at]], entry.top)


def test_more_alternatives_than_tokens_gives_all_tokens() -> None:
    logprobs = BatchLogprobs([20])
    sampled = logprobs(mx.zeros((1, 3)), mx.array([1]))
    entry = logprobs.read(sampled, [1])[0]
    assert [token for token, _ in entry.top] == [0, 1, 2]


def test_the_excluded_end_of_sequence_has_no_probability(model: Any) -> None:
    received = alone(
        engine_model(model), PROMPT, 20, sampling=Sampling(logit_bias=((0, 1e6),)), logprobs=1
    )
    assert received.finished is not None
    assert received.finished.reason == "stop"
    assert received.finished.logprobs == ()


LONG = [(place * place + 7 * place) % (VOCABULARY - 1) + 1 for place in range(150)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_prompt_logprobs_equal_a_plain_pass_also_after_the_prompt_was_stored(kind: str) -> None:
    plain = _plain(random_model(kind), LONG)
    rounds = Rounds(engine_model(random_model(kind)))
    rounds.submit(1, [9, 8, 7], 400, ignore_eos=True)
    rounds.submit(2, LONG, 1)
    rounds.drain()
    for ticket in (3, 4):
        rounds.submit(ticket, LONG, 1, prompt_logprobs=3, prompt_only=ticket == 3)
    rounds.drain()
    for ticket in (3, 4):
        end = rounds.received[ticket].finished
        assert end is not None
        assert end.usage.cached_tokens == 0
        assert end.prompt_logprobs is not None
        assert end.prompt_logprobs.first == LONG[0]
        assert [entry.token for entry in end.prompt_logprobs.rest] == LONG[1:]
        for entry, values in zip(end.prompt_logprobs.rest, plain[:-1], strict=True):
            assert abs(entry.logprob - values[entry.token]) < 1e-3
            best = np.sort(values)[::-1][:3]
            assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-3)
    only = rounds.received[3]
    assert only.finished is not None
    assert (only.text, only.finished.reason, only.finished.usage.completion_tokens) == (
        "",
        "length",
        0,
    )


def test_prompt_logprobs_are_computed_between_the_steps_of_others(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_MOST_LOGITS", 8 * VOCABULARY)
    rounds = Rounds(engine_model(model))
    rounds.submit(1, [1, 2, 3], 1000, ignore_eos=True)
    while len(rounds.received[1].tokens) < 2:
        rounds.step()
    rounds.submit(2, LONG, 1, prompt_logprobs=0, prompt_only=True)
    while rounds.received[2].finished is None:
        before = len(rounds.received[1].tokens)
        rounds.step()
        assert len(rounds.received[1].tokens) == before + 1
    assert len(rounds.received[1].tokens) >= len(LONG) // 32


def test_those_of_the_prompt_are_whole_though_the_first_token_ends_the_answer(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, a prefill pass stays in flight behind the next decode step of the others."""
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: False)
    rounds = Rounds(engine_model(model))
    rounds.submit(1, [1, 2, 3], 1000, ignore_eos=True)
    while len(rounds.received[1].tokens) < 2:
        rounds.step()
    rounds.submit(2, LONG, 1, prompt_logprobs=0)
    while rounds.received[2].finished is None:
        rounds.step()
    end = rounds.received[2].finished
    assert end.prompt_logprobs is not None
    assert [entry.token for entry in end.prompt_logprobs.rest] == LONG[1:]
