"""A row's tokens depend on its request alone: not on the batch, the order, or what is stored.

If it fails, users get mixed-up requests. Schedules are random: rows arrive
and are cancelled at any step, share prefixes, repeat or continue each other, differ in length, in
sampling, in grammar and in whether they want log-probabilities. Memory runs short at any step, so
rows are preempted; prompts share passes; entries are moved. Every row that is not cancelled must
get exactly the tokens that it gets alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from backend.engine import device
from backend.engine.caching import kv
from backend.engine.caching.kv import BatchCache, Member
from backend.engine.constraints.constraint import words
from backend.engine.events import TokenLogprob
from backend.engine.executing.executor import HEAVY_BYTES
from backend.engine.model import EngineModel
from backend.engine.planning.plan import StepPlan
from backend.engine.request import WHOLE, Sampling
from backend.engine.sampling.penalties import Past
from backend.engine.sampling.sampler import BatchSampler
from common.prefixes import common_prefix
from tests.engine.random_models import CONFIGS, VOCABULARY, random_model
from tests.engine.rounds import MIB, Received, Rounds, alone, engine_model
from tests.long import TEST_LONG

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("small_grammars")]
SCHEDULES = {"full": 90, "window": 40, "hybrid": 40, "recurrent": 40}
if not TEST_LONG:
    SCHEDULES = {kind: count // 4 for kind, count in SCHEDULES.items()}
ROUNDS = 40
MOST_ROWS = 10
LONGEST = 256  # tokens of a prompt and its answer: the smallest unit in which KV is counted


# as if a CPU computed its steps so slowly that their tokens are read before the next step
HEAVY = {"weights_bytes": HEAVY_BYTES, "memory_limit": HEAVY_BYTES + 512 * MIB}


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    limit: int
    sampling: Sampling
    stride: int
    """0, or the distance that the grammar wants between a token and the next (modulo 7)."""
    logprobs: int | None
    stop: tuple[str, ...] = ()
    adapter: str = ""

    def play(self, rounds: Rounds, ticket: int) -> None:
        grammar = Strides(self.stride, self.limit // 2) if self.stride else None
        rounds.submit(
            ticket,
            self.prompt,
            self.limit,
            sampling=self.sampling,
            grammar=grammar,
            logprobs=self.logprobs,
            stop=self.stop,
            adapter=self.adapter,
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

    def look_ahead(self, draft_tokens: Sequence[int], allowed: np.ndarray) -> int:
        before = self._left, self._next
        taken = 0
        for token, mask in zip(draft_tokens, allowed, strict=True):
            if self.ended or token % 7 != self._next:
                break
            self.accept(token)
            self.fill(mask)
            taken += 1
        self._left, self._next = before
        return taken

    def accept(self, token: int) -> None:
        assert token % 7 == self._next, "a token that the mask did not allow"
        self._next = (self._next + self._stride) % 7
        self._left -= 1


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_row_gets_the_same_tokens_as_alone(kind: str) -> None:
    network = random_model(kind)
    models = [
        engine_model(network, prefill_chunk=32),
        engine_model(network, prefill_chunk=128, **HEAVY),
    ]
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES[kind]):
        seen += check_schedule(models[seed % 2], seed, models[0])
    for what in ("rows served from the prefix cache", "rows preempted", "passes shared"):
        assert seen[what] > SCHEDULES[kind], f"hardly any {what}: {seen}"
    # A few schedules may have no such pass.
    assert seen["passes with a row that was left"] or SCHEDULES[kind] < 20
    # Entries whose layers cannot be trimmed stay for prompts that need their snapshots.
    assert seen["entries moved"] > 0 or not models[0].trims


def test_on_a_cpu_every_step_of_a_slow_model_has_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the second token takes two steps, because the first does not wait for a step."""
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: True)
    rounds = Rounds(engine_model(random_model("full"), **HEAVY))
    rounds.submit(1, [1, 2, 3], 10, ignore_eos=True)
    rounds.submit(2, [4, 5, 6], 8, ignore_eos=True, sampling=Sampling(temperature=1.0, seed=1))
    lengths = []
    while rounds.scheduler.busy:
        rounds.step()
        lengths.append((len(rounds.received[1].tokens), len(rounds.received[2].tokens)))
    first = lengths.index((1, 1))
    assert lengths[first : first + 10] == [(at, min(at, 8)) for at in range(1, 11)]


def check_schedule(
    model: EngineModel,
    seed: int,
    reference: EngineModel | None = None,
    learn: Callable[[list[int]], None] = lambda _: None,
    closeness: float = 1e-3,
    rounding: float = 0.0,
) -> Counter[str]:
    """Play one schedule; returns how often each special case occurred. A failure names the seed.

    reference: computes the answer of every row alone; by default the same model. learn: is called
    with each prompt and its answer beforehand. closeness: of log-probabilities. rounding: by what
    share of their standard deviation the logits may move, which may change an answer from some
    token on (`may_differ`). The rest of such an answer is not compared. Answers that rounding has
    changed, in their tokens or in their log-probabilities by `closeness` or more, are counted. Half
    of the schedules run in the order of a GPU; in half of them, rows that were left stay in the
    passes even if no prompt is being prefilled.
    """
    try:
        return _play(model, random.Random(seed), reference or model, learn, closeness, rounding)
    except BaseException as fault:
        fault.add_note(f"seed {seed}")
        raise


def _play(
    model: EngineModel,
    dice: random.Random,
    reference: EngineModel,
    learn: Callable[[list[int]], None],
    closeness: float,
    rounding: float,
) -> Counter[str]:
    waits = dice.random() < 0.5
    common = [dice.randrange(1, VOCABULARY) for _ in range(60)]
    keeps = common[0] % 2 == 0 and model.leader is None  # other ranks would not know of it
    passes_with_unused = 0

    def arrange(cache: BatchCache, joining: Sequence[Member] = ()) -> list[int]:
        nonlocal passes_with_unused
        if keeps:
            cache.rows, cache.keeps_unused = MOST_ROWS, True
        order = arranged(cache, joining)
        passes_with_unused += cache.pass_rows is not None
        return order

    arranged = BatchCache.arrange
    with patch("backend.engine.device.may_wait_within_a_step", return_value=waits):
        rounds = Rounds(model)
    requests: dict[int, Request] = {}
    answers: dict[int, Received] = {}
    cancelled: set[int] = set()
    planner, executor = rounds.scheduler.planner, rounds.scheduler.executor
    plenty = planner.limits
    one = model.cost.copied(LONGEST) + model.cost.fixed  # a pass has each recurrent state twice
    if model.drafting is not None and model.drafting.cost is not None:
        one += model.drafting.cost.copied(LONGEST)
    with (
        patch.object(executor, "launch", wraps=executor.launch) as launch,
        patch.object(BatchCache, "arrange", arrange),
        patch.object(kv, "MOST_UNUSED", 0.8 if keeps else kv.MOST_UNUSED),
    ):
        for _ in range(ROUNDS):
            if dice.random() < 0.2:
                for _ in range(min(dice.choice([1, 1, 4]), MOST_ROWS - len(requests))):
                    ticket = len(requests) + 1
                    request = _request(dice, common, requests, rounds)
                    if model.adapters is not None:
                        adapter = dice.choice(["", *model.adapters.numbers])
                        request = replace(request, adapter=adapter)
                    requests[ticket] = request
                    lonely = Rounds(reference)
                    requests[ticket].play(lonely, 1)
                    lonely.drain()
                    answers[ticket] = lonely.received[1]
                    learn([*requests[ticket].prompt, *lonely.received[1].tokens])
                    requests[ticket].play(rounds, ticket)
            if requests and dice.random() < 0.05:
                victim = dice.choice(list(requests))
                rounds.scheduler.cancel(victim)
                cancelled.add(victim)
            if dice.random() < 0.2:
                room = dice.choice([one, 2 * one, plenty.budget, plenty.budget])
                planner.limits = replace(plenty, budget=room)
            rounds.step()
        planner.limits = plenty
        rounds.drain()
    seen = _passed_by([call.args[0] for call in launch.call_args_list])
    seen["passes with a row that was left"] = passes_with_unused
    assert not rounds.faults
    for ticket in requests.keys() - cancelled:
        expected, received = answers[ticket], rounds.received[ticket]
        assert received.error is None
        assert received.finished is not None
        assert expected.finished is not None
        if rounding and received.tokens != expected.tokens:
            request = requests[ticket]
            assert may_differ(reference, request, received.tokens, expected.tokens, rounding)
            seen["answers that rounding has changed"] += 1
            continue
        assert received.tokens == expected.tokens
        assert received.text == expected.text
        assert received.finished.reason == expected.finished.reason
        error = _logprob_error(received.finished.logprobs, expected.finished.logprobs)
        # The standard deviation of the logits of a model with quantised KV is about 1.
        assert error < max(closeness, rounding)
        seen["answers that rounding has changed"] += error >= closeness
        usage = received.finished.usage
        assert usage.prompt_tokens == len(requests[ticket].prompt)
        assert usage.completion_tokens == expected.finished.usage.completion_tokens
        seen["rows served from the prefix cache"] += usage.cached_tokens > 0
        seen["tokens compared"] += usage.completion_tokens
    return seen


def may_differ(
    model: EngineModel,
    request: Request,
    received: Sequence[int],
    expected: Sequence[int],
    rounding: float,
) -> bool:
    """Whether answers differ because rounding decides between the first tokens that differ.

    If the logits of just these two tokens move by the share `rounding` of the standard deviation of
    all, the sampler chooses the one that was received.
    """
    at = common_prefix(received, expected)
    token, other = ([*answer, 0][at] for answer in (received, expected))  # 0 ends an answer
    tokens = [*request.prompt, *expected[:at]]
    logits = kv.feed_tokens(model.model, kv.new_row(model.model), [tokens])[:, -1]
    moved = rounding * mx.std(logits)
    logits[:, token] += moved
    logits[:, other] -= moved
    allowed = np.full((1, words(model.vocabulary)), 0xFFFFFFFF, dtype=np.uint32)
    if request.stride:
        grammar = Strides(request.stride, request.limit // 2)
        grammar.restart(expected[:at])
        grammar.fill(allowed[0])
    past = Past(tokens[:-1], len(request.prompt), len(request.prompt) + request.limit)
    sampler = BatchSampler([request.sampling], [past], model.vocabulary, constrained=[0])
    return sampler(logits, mx.array(tokens[-1:]), [at], allowed).item() == token


@pytest.mark.parametrize("stride", [0, 3])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=3)])
def test_rounding_explains_only_a_choice_between_nearly_equal_tokens(
    sampling: Sampling, stride: int
) -> None:
    model = engine_model(random_model("full"))
    request = Request([5, 9, 33, 2], 12, sampling, stride, None)
    rounds = Rounds(model)
    request.play(rounds, 1)
    rounds.drain()
    answer = rounds.received[1].tokens
    allowed = [token for token in range(1, VOCABULARY) if not stride or token % 7 == answer[3] % 7]
    others = [[*answer[:3], token] for token in allowed if token != answer[3]]
    few, many = (
        [other for other in others if may_differ(model, request, other, answer, rounding)]
        for rounding in (1e-3, 20.0)
    )
    assert not few
    assert many == others


def _passed_by(plans: Sequence[StepPlan]) -> Counter[str]:
    groups = [group for plan in plans for group in plan.prefill]
    sources = [start.source for plan in plans for start in plan.start]
    return Counter(
        {
            "rows preempted": sum(len(plan.preempt) for plan in plans),
            "passes shared": sum(len(group) > 1 for group in groups),
            "entries moved": sum(source is not None and source.move for source in sources),
        }
    )


def _logprob_error(
    received: tuple[TokenLogprob, ...] | None, expected: tuple[TokenLogprob, ...] | None
) -> float:
    """Return the greatest difference between the log-probabilities of the same tokens."""
    assert (received is None) == (expected is None)
    error = 0.0
    for one, other in zip(received or (), expected or (), strict=True):
        assert one.token == other.token
        assert len(one.top) == len(other.top)
        error = max(error, abs(one.logprob - other.logprob))
    return error


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
            prompt = earlier[other].prompt + rounds.received[other].tokens
    prompt = prompt[: LONGEST - 40]
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
        dice.choice([(), (), (), ("<7", "11>")]),
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_same_prompt_again_computes_only_its_last_token(kind: str) -> None:
    """Other servers recompute the whole prompt on an exact hit, or fail on an empty one."""
    model = engine_model(random_model(kind))
    prompt = list(range(1, 50))
    rounds = Rounds(model)
    for ticket in (1, 2, 3):
        rounds.submit(ticket, prompt, 12)
        rounds.drain()
    expected = alone(model, prompt, 12).tokens
    assert [rounds.received[ticket].tokens for ticket in (1, 2, 3)] == [expected] * 3
    for ticket in (2, 3):
        finished = rounds.received[ticket].finished
        assert finished is not None
        assert finished.usage.cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_prompt_equal_to_a_whole_conversation_does_not_damage_the_store(kind: str) -> None:
    """In another server, such a prompt put a doubled context into the store for everybody."""
    model = engine_model(random_model(kind))
    rounds = Rounds(model)
    rounds.submit(1, range(1, 40), 10)
    rounds.drain()
    whole = [*range(1, 40), *rounds.received[1].tokens]
    strangers = [*whole[:5], 77, 78, 79]
    for ticket, prompt in enumerate((whole, whole, strangers, whole), start=2):
        rounds.submit(ticket, prompt, 10)
        rounds.drain()
        assert rounds.received[ticket].tokens == alone(model, prompt, 10).tokens


@pytest.mark.parametrize("kind", ["window", "hybrid", "recurrent"])
def test_a_shared_prefix_is_reused_if_caches_cannot_be_trimmed(kind: str) -> None:
    """The second prompt shows where conversations part; that prefix is stored from the third on."""
    model = engine_model(random_model(kind))
    rounds = Rounds(model)
    system = [dice % (VOCABULARY - 1) + 1 for dice in range(40)]
    for ticket in (1, 2, 3):
        rounds.submit(ticket, [*system, 90 + ticket, *range(1, 10)], 4)
        rounds.drain()
    finished = rounds.received[3].finished
    assert finished is not None
    assert finished.usage.cached_tokens == len(system)
