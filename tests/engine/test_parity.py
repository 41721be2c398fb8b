"""A row's tokens depend on its request alone: not on the batch, the order, or what is stored.

This is the property whose loss users call mixed-up requests. Schedules are random: rows arrive
and are cancelled at any step, share prefixes, repeat or continue each other, differ in length, in
sampling, in grammar and in whether they want log-probabilities. Every survivor must say exactly
what it says alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.events import TokenLogprob
from backend.engine.model import EngineModel
from backend.engine.request import WHOLE, Sampling
from tests.engine.random_models import CONFIGS, VOCABULARY, random_model
from tests.engine.rounds import Rounds, alone, engine_model

pytestmark = pytest.mark.timeout(1200)
SCHEDULES = {"full": 90, "window": 40, "hybrid": 40, "recurrent": 40}
ROUNDS = 40
MOST_ROWS = 10


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    limit: int
    sampling: Sampling
    stride: int
    """0, or the distance that the grammar wants between a token and the next (modulo 7)."""
    logprobs: int | None

    def play(self, rounds: Rounds, ticket: int) -> None:
        grammar = Strides(self.stride, self.limit // 2) if self.stride else None
        rounds.submit(
            ticket,
            self.prompt,
            self.limit,
            sampling=self.sampling,
            grammar=grammar,
            logprobs=self.logprobs,
        )


class Strides:
    """A grammar over token ids: each token's remainder by 7 follows from the one before."""

    def __init__(self, stride: int, most: int) -> None:
        self._stride = stride
        self._most = self._left = most
        self._next = 0

    @property
    def ended(self) -> bool:
        return self._left <= 0

    def fill(self, allowed: np.ndarray) -> None:
        bits = np.arange(len(allowed) * 32) % 7 == self._next
        allowed[:] = np.packbits(bits, bitorder="little").view(np.uint32)

    def restart(self, tokens: Sequence[int]) -> None:
        self._left, self._next = self._most, 0
        for token in tokens:
            self.accept(token)

    def accept(self, token: int) -> None:
        assert token % 7 == self._next, "a token that the mask did not allow"
        self._next = (self._next + self._stride) % 7
        self._left -= 1


@pytest.fixture(autouse=True)
def _no_compiler() -> None:
    mx.disable_compile()


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_row_says_what_it_says_alone(kind: str) -> None:
    model = engine_model(random_model(kind))
    reused = 0
    for seed in range(SCHEDULES[kind]):
        reused += _check_schedule(model, random.Random(seed))
    assert reused > SCHEDULES[kind], "hardly any row was served from the prefix cache"


def _check_schedule(model: EngineModel, dice: random.Random) -> int:
    """Play one schedule; returns how many rows a stored prefix served."""
    rounds = Rounds(model)
    requests: dict[int, Request] = {}
    cancelled: set[int] = set()
    common = [dice.randrange(1, VOCABULARY) for _ in range(60)]
    for _ in range(ROUNDS):
        if dice.random() < 0.25 and len(requests) < MOST_ROWS:
            ticket = len(requests) + 1
            requests[ticket] = _request(dice, common, requests, rounds)
            requests[ticket].play(rounds, ticket)
        if requests and dice.random() < 0.05:
            victim = dice.choice(list(requests))
            rounds.scheduler.cancel(victim)
            cancelled.add(victim)
        rounds.step()
    rounds.drain()
    assert not rounds.faults
    reused = 0
    for ticket in requests.keys() - cancelled:
        lonely = Rounds(model)
        requests[ticket].play(lonely, 1)
        lonely.drain()
        expected, heard = lonely.heard[1], rounds.heard[ticket]
        assert heard.error is None
        assert heard.finished is not None
        assert expected.finished is not None
        assert heard.tokens == expected.tokens
        assert heard.finished.reason == expected.finished.reason
        _check_logprobs(heard.finished.logprobs, expected.finished.logprobs)
        usage = heard.finished.usage
        assert usage.prompt_tokens == len(requests[ticket].prompt)
        assert usage.completion_tokens == expected.finished.usage.completion_tokens
        reused += usage.cached_tokens > 0
    return reused


def _check_logprobs(
    heard: tuple[TokenLogprob, ...] | None, expected: tuple[TokenLogprob, ...] | None
) -> None:
    assert (heard is None) == (expected is None)
    for one, other in zip(heard or (), expected or (), strict=True):
        assert one.token == other.token
        assert abs(one.logprob - other.logprob) < 1e-3
        assert len(one.top) == len(other.top)


def _request(
    dice: random.Random, common: list[int], earlier: dict[int, Request], rounds: Rounds
) -> Request:
    prompt = common[: dice.randrange(60)]
    prompt += [dice.randrange(1, VOCABULARY) for _ in range(dice.randrange(1, 30))]
    if earlier:
        other = dice.choice(list(earlier))
        kind = dice.random()
        if kind < 0.15:
            prompt = earlier[other].prompt
        elif kind < 0.45:
            prompt = earlier[other].prompt + rounds.heard[other].tokens
    sampling = Sampling()
    if dice.random() < 0.5:
        sampling = Sampling(
            temperature=1.0,
            top_p=dice.choice([1.0, 0.9]),
            top_k=dice.choice([0, 5]),
            min_p=dice.choice([0.0, 0.05]),
            typical_p=dice.choice([1.0, 1.0, 0.8]),
            xtc_probability=dice.choice([0.0, 0.0, 0.5]),
            seed=dice.randrange(5),
        )
    if dice.random() < 0.5:
        sampling = replace(
            sampling,
            repetition=dice.choice([1.0, 1.3]),
            window=dice.choice([2, 64, WHOLE]),
            frequency=dice.choice([0.0, 0.4]),
            presence=dice.choice([0.0, 0.6]),
            logit_bias=dice.choice([(), ((5, 3.0), (9, -3.0))]),
        )
    return Request(
        prompt,
        dice.choice([1, 2, 5, 20, 40]),
        sampling,
        dice.choice([0, 0, 0, 1, 3]),
        dice.choice([None, None, 0, 3]),
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_same_prompt_again_runs_its_last_token_only(kind: str) -> None:
    """An exact hit is where peers re-feed the whole prompt, or die on an empty one."""
    model = engine_model(random_model(kind))
    prompt = list(range(1, 50))
    rounds = Rounds(model)
    for ticket in (1, 2, 3):
        rounds.submit(ticket, prompt, 12)
        rounds.drain()
    expected = alone(model, prompt, 12).tokens
    assert [rounds.heard[ticket].tokens for ticket in (1, 2, 3)] == [expected] * 3
    for ticket in (2, 3):
        finished = rounds.heard[ticket].finished
        assert finished is not None
        assert finished.usage.cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_prompt_equal_to_a_whole_conversation_leaks_nothing(kind: str) -> None:
    """Peers' defect 2: such a prompt filled the store with a doubled context for everybody."""
    model = engine_model(random_model(kind))
    rounds = Rounds(model)
    rounds.submit(1, range(1, 40), 10)
    rounds.drain()
    whole = [*range(1, 40), *rounds.heard[1].tokens]
    strangers = [*whole[:5], 77, 78, 79]
    for ticket, prompt in enumerate((whole, whole, strangers, whole), start=2):
        rounds.submit(ticket, prompt, 10)
        rounds.drain()
        assert rounds.heard[ticket].tokens == alone(model, prompt, 10).tokens


@pytest.mark.parametrize("kind", ["window", "hybrid", "recurrent"])
def test_a_shared_beginning_is_reused_where_caches_cannot_be_cut_back(kind: str) -> None:
    """The second prompt shows where conversations part; from the third on the part is stored."""
    model = engine_model(random_model(kind))
    rounds = Rounds(model)
    system = [dice % (VOCABULARY - 1) + 1 for dice in range(40)]
    for ticket in (1, 2, 3):
        rounds.submit(ticket, [*system, 90 + ticket, *range(1, 10)], 4)
        rounds.drain()
    finished = rounds.heard[3].finished
    assert finished is not None
    assert finished.usage.cached_tokens == len(system)
