"""Rows arrive, leave and fail, and other rows are not affected."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.constraints.thinking_budget import ThinkingBudget
from backend.engine.errors import Cancelled, EngineFailed, Overloaded
from backend.engine.planning.plan import PassCost, PlannerEvent, StepPlan
from backend.engine.planning.prefix_index import PrefixKey
from backend.engine.request import Sampling
from backend.engine.token_text import ByteStream
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser
from tests.engine.random_models import CONFIGS, VOCABULARY, random_model
from tests.engine.rounds import MIB, Rounds, alone, engine_model
from tests.engine.test_parity import Strides
from tests.long import TEST_LONG

pytestmark = pytest.mark.usefixtures("each_order")

END = 7
LONG = [token % 90 + 1 for token in range(400)]


def test_cancel_frees_the_slot_in_every_state() -> None:
    rounds = Rounds(engine_model(random_model("full"), slots=2))
    rounds.submit(1, [1, 2, 3], 1000)
    rounds.submit(2, LONG, 1000)
    rounds.step()
    rounds.submit(3, [4, 5, 6], 1000)
    rounds.step()
    assert rounds.tickets("decode") == [1]
    assert rounds.tickets("prefill") == [2]
    assert rounds.tickets("waiting") == [3]
    for ticket in (3, 2, 1):
        rounds.scheduler.cancel(ticket)
    rounds.drain()
    assert rounds.admitted == []
    assert rounds.scheduler.executor.row_bytes == 0


def test_a_token_that_ends_an_answer_is_not_counted_and_one_that_may_not_is() -> None:
    model = engine_model(random_model("full"), end_tokens=frozenset())
    whole = alone(model, [1, 2, 3], 12, sampling=Sampling(temperature=1, seed=3)).tokens
    end = whole[5]
    rounds = Rounds(replace(model, end_tokens=frozenset({end})))
    for ticket, ignores in ((1, False), (2, True)):
        drawn = Sampling(temperature=1, seed=3)
        rounds.submit(ticket, [1, 2, 3], 12, sampling=drawn, ignore_eos=ignores)
    rounds.drain()
    ended = [rounds.received[ticket].finished for ticket in (1, 2)]
    counts = [one.usage.completion_tokens for one in ended if one is not None]
    assert counts == [whole.index(end), 12]
    assert rounds.gauges.tokens_generated == sum(counts)


def test_the_planner_is_hardly_asked_while_rows_only_decode_and_learns_all_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = Rounds(engine_model(random_model("full"), end_tokens=frozenset()))
    for ticket in (1, 2, 3):
        rounds.submit(ticket, [ticket, 2, 3], 200)
    while len(rounds.tickets("decode")) < 3:
        rounds.step()
    for _ in range(3):
        rounds.step()
    plans: list[float] = []
    planner = rounds.scheduler.planner
    plan = planner.plan

    def counting(now: float, events: list[PlannerEvent]) -> StepPlan:
        plans.append(now)
        return plan(now, events)

    monkeypatch.setattr(planner, "plan", counting)
    for _ in range(100):
        rounds.step()
    assert len(plans) <= 1  # the rows may need more KV
    plans.clear()
    rounds.scheduler.cancel(1)
    rounds.step()
    assert len(plans) == 1
    for ticket in (2, 3):
        learnt = planner.sequences.by_number[ticket].generated
        assert learnt == rounds.received[ticket].tokens[: len(learnt)]
        assert len(learnt) > 100


def test_reported_times_contain_the_launch_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(engine_model(random_model("full")))
    seconds = [1.0]
    monkeypatch.setattr("time.perf_counter", lambda: seconds[0])
    launch = rounds.scheduler.executor.launch

    def slow(plan: StepPlan) -> list[PlannerEvent]:
        events = launch(plan)
        seconds[0] += 5.0
        return events

    monkeypatch.setattr(rounds.scheduler.executor, "launch", slow)
    rounds.submit(1, [1, 2, 3], 4, ignore_eos=True)
    rounds.drain()
    assert rounds.received[1].finished is not None
    assert rounds.received[1].finished.usage.prefill_ms == pytest.approx(5_000)


def test_a_waiting_row_takes_the_freed_slot_in_the_next_round() -> None:
    rounds = Rounds(engine_model(random_model("full"), slots=1))
    rounds.submit(1, [1, 2, 3], 1000)
    rounds.submit(2, [1, 2, 3], 1000)
    rounds.step()
    rounds.scheduler.cancel(1)
    rounds.step()
    rounds.step()
    assert rounds.tickets("decode") == [2]


def test_a_running_row_gets_a_token_in_every_round_of_a_long_prefill() -> None:
    rounds = Rounds(engine_model(random_model("full")))
    rounds.submit(1, [1, 2, 3], 1000, ignore_eos=True)
    while len(rounds.received[1].tokens) < 2:
        rounds.step()
    rounds.submit(2, LONG, 1, ignore_eos=True)
    waited = 0
    while not rounds.received[2].text:
        before = len(rounds.received[1].tokens)
        rounds.step()
        waited += 1
        assert len(rounds.received[1].tokens) == before + 1
    assert waited > len(LONG) // 64


def test_a_short_prompt_overtakes_a_long_one() -> None:
    rounds = Rounds(engine_model(random_model("full")))
    rounds.submit(1, LONG, 5, ignore_eos=True)
    rounds.step()
    rounds.submit(2, [5, 6, 7], 5, ignore_eos=True)
    while rounds.received[2].finished is None:
        rounds.step()
    assert rounds.received[1].text == ""


class _Broken:
    """A model that raises at a certain token, as no small model does."""

    def __init__(self, model: Any, poison: int) -> None:
        self._model, self._poison = model, poison
        self.layers = model.layers
        self.named_modules = model.named_modules

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        if self._poison in np.array(tokens):
            raise RuntimeError("injected")
        return logits


def test_a_row_that_fails_in_prefill_fails_alone_and_is_not_stored() -> None:
    """In another server, a request that failed half-way damaged the next one through its prefix."""
    whole = engine_model(random_model("full"))
    rounds = Rounds(engine_model(_Broken(random_model("full"), 95)))
    good = list(range(1, 60))
    rounds.submit(1, [1, 2, 3], 30)
    rounds.step()
    rounds.submit(2, [*good, 95, 94, 93], 5)
    rounds.drain()
    assert isinstance(rounds.received[2].error, EngineFailed)
    assert len(rounds.faults) == 1
    assert rounds.received[1].tokens == alone(whole, [1, 2, 3], 30).tokens
    rounds.submit(3, good, 10)
    rounds.drain()
    assert rounds.received[3].tokens == alone(whole, good, 10).tokens


def test_a_failed_decode_step_ends_its_rows_and_the_next_request_is_served() -> None:
    model = random_model("full")
    rounds = Rounds(engine_model(_Broken(model, 95)))
    rounds.submit(1, [1, 2, 95], 5)
    rounds.drain()
    assert isinstance(rounds.received[1].error, EngineFailed)
    rounds.submit(2, [1, 2, 3], 5)
    rounds.drain()
    assert rounds.received[2].tokens == alone(engine_model(model), [1, 2, 3], 5).tokens


def test_cancel_all_ends_every_request_and_empties_the_store() -> None:
    rounds = Rounds(engine_model(random_model("full"), slots=2))
    for ticket in (1, 2, 3):
        rounds.submit(ticket, LONG, 100)
        rounds.step()
    rounds.scheduler.cancel_all(Cancelled("over"))
    assert all(isinstance(rounds.received[ticket].error, Cancelled) for ticket in (1, 2, 3))
    assert not rounds.scheduler.busy
    assert len(rounds.scheduler.planner.entries.index) == 0
    assert rounds.scheduler.executor.entry_bytes == 0


def test_a_row_that_can_never_fit_is_refused_with_both_sizes() -> None:
    rounds = Rounds(engine_model(random_model("full"), memory_limit=MIB // 8))
    rounds.submit(1, LONG, 2000)
    rounds.drain()
    assert isinstance(rounds.received[1].error, Overloaded)
    assert "400 tokens" in str(rounds.received[1].error)
    assert "the limit is 0 MiB" in str(rounds.received[1].error)


def test_filters_of_the_whole_vocabulary_are_charged_to_the_rows_that_have_them() -> None:
    passes = PassCost(per_filter=600 * MIB)
    rounds = Rounds(engine_model(random_model("full"), passes=passes))
    samplings = [
        Sampling(),
        Sampling(temperature=0.8, min_p=0.1),
        Sampling(temperature=0.8, top_p=0.9, top_k=5),
        Sampling(top_p=0.9),
        Sampling(temperature=0.8, top_p=0.9),
        Sampling(temperature=0.8, typical_p=0.9),
    ]
    for ticket, sampling in enumerate(samplings):
        rounds.submit(ticket, [3, 1, 4], 2, sampling=sampling)
    rounds.drain()
    refused = [isinstance(received.error, Overloaded) for received in rounds.received.values()]
    assert refused == [False, False, False, False, True, True]


def test_rows_wait_for_memory_and_stored_prefixes_are_dropped_for_them() -> None:
    model = engine_model(random_model("full"), prompt_cache_bytes=MIB)
    one_row = model.cost.of(len(LONG) + 100) + model.cost.of(len(LONG))
    rounds = Rounds(engine_model(random_model("full"), memory_limit=one_row + 20_000))
    rounds.submit(1, LONG, 100)
    rounds.submit(2, LONG, 100)
    rounds.step()
    assert rounds.tickets("waiting") == [2]
    assert rounds.scheduler.planner.entries.index.nbytes <= 20_000
    rounds.drain()
    assert rounds.received[2].finished is not None


def test_a_row_that_outgrows_the_memory_ends_with_a_reason() -> None:
    model = engine_model(random_model("full"))
    limit = model.cost.copied(3 + 512)
    rounds = Rounds(engine_model(random_model("full"), memory_limit=limit + 1000))
    rounds.submit(1, [1, 2, 3], 1000, ignore_eos=True)
    rounds.drain()
    assert isinstance(rounds.received[1].error, Overloaded)
    assert "KV cache is full" in str(rounds.received[1].error)


def test_the_limit_counts_generated_tokens_exactly() -> None:
    model = engine_model(random_model("full"))
    for limit in (1, 2, 7):
        received = alone(model, [1, 2, 3], limit, ignore_eos=True)
        assert len(received.tokens) == limit
        assert received.finished is not None
        assert received.finished.reason == "length"
        assert received.finished.usage.completion_tokens == limit


def test_the_end_token_is_neither_counted_nor_shown() -> None:
    model = engine_model(random_model("full"))
    endless = alone(model, [1, 2, 3], 30, ignore_eos=True).tokens
    ending = engine_model(random_model("full"), end_tokens=frozenset({endless[4]}))
    received = alone(ending, [1, 2, 3], 30)
    assert received.tokens == endless[: endless.index(endless[4])]
    assert received.finished is not None
    assert received.finished.reason == "stop"
    assert received.finished.usage.completion_tokens == len(received.tokens)


def test_ignore_eos_never_samples_an_end_token() -> None:
    model = engine_model(random_model("full"))
    likely = alone(model, [1, 2, 3], 1, ignore_eos=True).tokens[0]
    ending = engine_model(random_model("full"), end_tokens=frozenset({likely}))
    for sampling in (Sampling(), Sampling(temperature=2.0, seed=3)):
        received = alone(ending, [1, 2, 3], 40, sampling=sampling, ignore_eos=True)
        assert likely not in received.tokens
        assert len(received.tokens) == 40


@pytest.mark.parametrize("stop", ["><", "9", "<"])
def test_a_stop_string_over_token_boundaries_ends_the_row_and_is_not_sent(stop: str) -> None:
    model = engine_model(random_model("full"))
    text = alone(model, [1, 2, 3], 30, ignore_eos=True).text
    received = alone(model, [1, 2, 3], 30, ignore_eos=True, stop=(stop,))
    assert received.text == text.partition(stop)[0]
    assert received.finished is not None
    assert received.finished.reason == "stop"


def test_a_short_shared_prefix_is_stored_at_its_own_size() -> None:
    """A trimmed copy of a long conversation must not count, or evict, as much as the whole."""
    model = engine_model(random_model("full"))
    rounds = Rounds(engine_model(random_model("full"), prompt_cache_bytes=400_000))
    long = [7, *LONG, *LONG]
    rounds.submit(1, long, 2)
    rounds.drain()
    for ticket in range(2, 8):
        rounds.submit(ticket, [7, ticket, 3, 4], 2)
        rounds.drain()
    assert rounds.scheduler.executor.entry_bytes < model.cost.of(len(long)) + 12 * model.cost.of(8)
    assert rounds.scheduler.planner.entries.index.find(PrefixKey([*long, 1])).length >= len(long)


class _Speechless:
    """A decoder that raises at its first token."""

    def add(self, token: int) -> str:
        raise KeyError(token)

    def finish(self) -> str:
        return ""


def test_a_row_whose_text_decoding_fails_ends_alone() -> None:
    whole = engine_model(random_model("full"))
    rounds = Rounds(engine_model(random_model("full")))
    rounds.submit(1, [1, 2, 3], 20)
    rounds.step()
    rounds.model.new_text = lambda _: _Speechless()
    rounds.submit(2, [4, 5, 6], 20)
    rounds.drain()
    assert isinstance(rounds.received[2].error, EngineFailed)
    assert rounds.received[1].tokens == alone(whole, [1, 2, 3], 20).tokens


def _thinking(most: int | None) -> ThinkingBudget | None:
    """A budget for an answer that begins inside reasoning, which the token END closes."""
    if most is None:
        return None
    texts = [b"so "] * VOCABULARY
    texts[END] = b"</think>"
    return ThinkingBudget(
        most,
        lambda: ChatParser(ChatFormat.named("hermes", "qwen3"), prompt_tail="<think>\n"),
        lambda: ByteStream(texts.__getitem__, strip_first_space=False),
        lambda _: [END],
        {},
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_preempted_sequences_are_recomputed_and_get_the_same_tokens(kind: str) -> None:
    """Memory runs short at random; no request is ended and no token changes."""
    whole = engine_model(random_model(kind))
    one = whole.cost.copied(700) + whole.cost.fixed  # a pass has each recurrent state twice
    preempted = 0
    seeds = 12 if TEST_LONG else 2
    for seed in range(seeds):
        dice = random.Random(seed)
        rounds = Rounds(engine_model(random_model(kind), memory_limit=3 * one))
        wanted = {}
        for ticket in range(1, 6):
            prompt = [dice.randrange(1, VOCABULARY) for _ in range(dice.randrange(2, 60))]
            request = {
                "sampling": dice.choice(
                    [Sampling(), Sampling(temperature=1.0, seed=ticket), Sampling(repetition=1.2)]
                ),
                "logprobs": dice.choice([None, 2]),
                "ignore_eos": True,
            }
            most = dice.choice([None, 0, 3, 20])
            wanted[ticket] = (prompt, dice.randrange(2, 60), request, most)
            prompt, limit, request, most = wanted[ticket]
            rounds.submit(ticket, prompt, limit, grammar=_thinking(most), **request)
        while rounds.scheduler.busy:
            limits = rounds.scheduler.planner.limits
            room = dice.choice([one, 2 * one, 6 * one])
            rounds.scheduler.planner.limits = replace(limits, budget=room)
            rounds.more = dice.random() < 0.5
            rounds.step()
        preempted += rounds.scheduler.planner.preemptions
        for ticket, (prompt, limit, request, most) in wanted.items():
            expected = alone(whole, prompt, limit, grammar=_thinking(most), **request)
            assert rounds.received[ticket].error is None
            assert rounds.received[ticket].tokens == expected.tokens
            if most is not None and most < limit:
                assert END in expected.tokens[: most + 1]
            ours, theirs = rounds.received[ticket].finished, expected.finished
            assert ours is not None
            assert theirs is not None
            assert ours.usage.completion_tokens == theirs.usage.completion_tokens
            assert len(ours.logprobs or ()) == len(theirs.logprobs or ())
    assert preempted > seeds


class _Short:
    """A model for which MLX's allocation fails at chosen calls."""

    def __init__(self, model: Any, calls: set[int]) -> None:
        self._model, self._calls, self._call = model, calls, 0
        self.layers = model.layers
        self.named_modules = model.named_modules

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self._call += 1
        logits: mx.array = self._model(tokens, cache=cache)
        if self._call in self._calls:
            raise RuntimeError("[malloc] Unable to allocate 123456 bytes.")
        return logits


def test_a_failed_allocation_drops_the_prompt_cache_and_loses_no_answer() -> None:
    model = random_model("full")
    whole = engine_model(model)
    for call in range(4, 24, 3):
        rounds = Rounds(replace(engine_model(model), model=_Short(model, {call})))
        for ticket in (1, 2, 3):
            rounds.submit(ticket, [*LONG[:50], ticket], 8, ignore_eos=True)
            rounds.step()
        rounds.drain()
        for ticket in (1, 2, 3):
            expected = alone(whole, [*LONG[:50], ticket], 8, ignore_eos=True).tokens
            assert rounds.received[ticket].tokens == expected, f"call {call}"


def test_an_allocation_that_fails_again_ends_the_sequence_with_figures() -> None:
    model = random_model("full")
    rounds = Rounds(replace(engine_model(model), model=_Short(model, set(range(3, 1000)))))
    rounds.submit(1, LONG[:50], 8, ignore_eos=True)
    rounds.drain()
    assert isinstance(rounds.received[1].error, Overloaded)
    assert "MiB" in str(rounds.received[1].error)


def test_a_first_token_is_delivered_by_the_step_that_ends_the_prefill() -> None:
    """Otherwise it would wait for a decode step: a CPU computes it while it is launched."""
    rounds = Rounds(engine_model(random_model("full")))
    for ticket in (1, 2):
        rounds.submit(ticket, [ticket, 2, 3], 5, ignore_eos=True)
    rounds.step()
    assert [len(rounds.received[ticket].tokens) for ticket in (1, 2)] == [1, 1]
    rounds.drain()
    for ticket in (1, 2):
        alone = Rounds(engine_model(random_model("full")))
        alone.submit(1, [ticket, 2, 3], 5, ignore_eos=True)
        alone.drain()
        assert rounds.received[ticket].tokens == alone.received[1].tokens


def test_an_answer_of_one_token_ends_without_a_decode_step() -> None:
    rounds = Rounds(engine_model(random_model("full")))
    rounds.submit(1, [1, 2, 3], 1, ignore_eos=True)
    rounds.step()
    received = rounds.received[1]
    assert len(received.tokens) == 1
    assert received.finished is not None
    assert received.finished.reason == "length"
    rounds.drain()


@pytest.mark.parametrize("limit", [1, 5])
def test_a_grammar_that_ends_with_the_last_token_is_a_stop_in_any_batch(limit: int) -> None:
    model = engine_model(random_model("full"))
    lone = alone(model, [1, 2, 3], limit, grammar=Strides(1, limit))
    rounds = Rounds(model)
    rounds.submit(1, [4, 5, 6], 40, ignore_eos=True)
    rounds.step()
    rounds.submit(2, [1, 2, 3], limit, grammar=Strides(1, limit))
    rounds.drain()
    for received in (lone, rounds.received[2]):
        assert received.finished is not None
        assert len(received.tokens) == limit
        assert received.finished.reason == "stop"


def test_the_log_mentions_answers_that_are_not_stored_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds = Rounds(engine_model(random_model("full"), prompt_cache_bytes=1))
    for ticket in range(1, 41):
        rounds.submit(ticket, LONG[:100], 2, ignore_eos=True)
        rounds.drain()
    counts = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert counts == [1, 2, 4, 8, 16, 32]
