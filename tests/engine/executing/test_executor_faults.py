"""Whatever fails in a step, only the requests that it was computed for may fail.

One course of requests takes every path of the executor. A fault is injected into one action, at
each of its first calls in turn: as a defect would raise it, and as MLX raises a failed allocation.
The other requests get the same answers as alone, no memory is leaked, and the next one is served.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np
import pytest

from backend.engine import device
from backend.engine.caching import kv
from backend.engine.disk_cache.use import DiskUse
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import LookupDrafter
from backend.engine.errors import Cancelled, EngineFailed
from backend.engine.executing import batch as decode_batch
from backend.engine.executing import choosing, prefill_passes
from backend.engine.executing.batch import DecodeBatch
from backend.engine.executing.choosing import Chooser, Chosen
from backend.engine.executing.executor_sequence import Rows
from backend.engine.executing.score_plan import Continuation, ScorePlan
from backend.engine.executing.scoring import Scoring
from backend.engine.model import EngineModel
from backend.engine.planning.plan import Masked
from backend.engine.request import Sampling
from backend.engine.sampling.logits_head import LogitsHead
from backend.engine.sampling.logprobs import BatchLogprobs
from backend.engine.sampling.sampler import BatchSampler
from tests.engine.random_models import VOCABULARY, random_model
from tests.engine.rounds import Received, Rounds, engine_model
from tests.engine.test_parity import Strides
from tests.long import TEST_LONG

pytestmark = pytest.mark.usefixtures("each_order", "small_grammars")
DEFECT = "injected"
NO_MEMORY = "[malloc] Unable to allocate 123456 bytes."
CALLS = (0, 1, 4)  # of an action that fail, each in a course of its own
STRIDE = 1 if TEST_LONG else 4  # of the steps or tokens after which something happens


def spread(count: int, salt: int) -> list[int]:
    return [(at * at + salt * at + salt) % (VOCABULARY - 1) + 1 for at in range(count)]


PROMPT = spread(80, 3)
SCORED = ScorePlan(spread(40, 11), tuple(Continuation(tuple(spread(n, n))) for n in (3, 9, 1)))
REQUESTS: dict[int, tuple[list[int], int, dict[str, Any]]] = {
    1: (PROMPT, 30, {}),
    2: ([*PROMPT[:60], 5, 6, 7], 20, {"sampling": Sampling(temperature=1.0, seed=2)}),
    3: (spread(20, 5), 25, {"logprobs": 2}),
    4: (spread(24, 7), 25, {"sampling": Sampling(repetition=1.3)}),
    6: (spread(18, 9), 22, {"grammar": 3}),
    7: ([*PROMPT[:79], 8, 9], 12, {}),
    8: ([*PROMPT, 1, 2, 3], 12, {}),
    9: (spread(50, 13), 8, {"prompt_logprobs": 1, "logprobs": 1}),
    10: (spread(23, 5), 25, {"grammar": 2, "logprobs": 1}),
}
SCORE = 5


def calls(action: object, message: str) -> Sequence[int]:
    """Which call of the action fails, by its number: one for each run of the requests.

    `make test` has one run that reaches such a call: a number that depends on the case or, if there
    are fewer calls, 0.
    """
    return CALLS if TEST_LONG else (CALLS[crc32(f"{action} {message}".encode()) % len(CALLS)], 0)


class Trap:
    """Raises at the chosen call of an action."""

    def __init__(self, at: int, message: str) -> None:
        self.at, self.message = at, message
        self.calls = 0

    @property
    def sprung(self) -> bool:
        return self.calls > self.at

    def step_on(self) -> None:
        self.calls += 1
        if self.calls == self.at + 1:
            raise RuntimeError(self.message)


class Watched:
    """A model with a trap in the passes of one kind; the result of such a pass is lost."""

    def __init__(self, model: Any, trap: Trap, kind: Callable[[int, int], bool]) -> None:
        self._model, self._trap, self._kind = model, trap, kind
        self.layers = model.layers

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        if self._kind(*tokens.shape):
            self._trap.step_on()
        return logits


PASSES: dict[str, Callable[[int, int], bool]] = {
    "prefill of one": lambda rows, width: rows == 1 and width > 1,
    "prefill of several": lambda rows, width: rows > 1 and width > 1,
    "decode of one": lambda rows, width: (rows, width) == (1, 1),
    "decode of several": lambda rows, width: rows > 1 and width == 1,
}


@dataclass(frozen=True)
class Action:
    """A function that the executor calls, to be made to fail.

    most: which requests its failure may end. late: it fails when its work is done, so its effects
    have happened. caller: it fails only when this function calls it.
    """

    owner: Any
    name: str
    most: int
    late: bool = False
    caller: str = ""
    kind: str = "full"

    def __str__(self) -> str:
        owner = getattr(self.owner, "__name__", "").rpartition(".")[2]
        return f"{owner}.{self.name}{'-late' * self.late}"

    def rig(self, patch: pytest.MonkeyPatch, trap: Trap) -> None:
        original = getattr(self.owner, self.name)

        def rigged(*given: Any, **named: Any) -> Any:
            if self.caller and sys._getframe(1).f_code.co_name != self.caller:
                return original(*given, **named)
            if not self.late:
                trap.step_on()
            result = original(*given, **named)
            if self.late:
                trap.step_on()
            return result

        patch.setattr(self.owner, self.name, rigged)


NOBODY, ONE, BATCH = 0, 1, 9
ACTIONS = [
    Action(kv, "new_row", ONE, caller="_fill"),
    Action(kv, "rewind", ONE, caller="_rewound"),
    Action(kv, "rewind", ONE, caller="_rewound", late=True, kind="hybrid"),
    Action(kv, "clone", ONE, caller="_fill"),
    Action(DecodeBatch, "extract", ONE, caller="_fill"),
    Action(DecodeBatch, "extract", NOBODY, caller="take"),
    Action(DecodeBatch, "take", NOBODY),
    Action(Rows, "extract", ONE, caller="_fill"),
    Action(Rows, "extract", NOBODY, caller="take"),
    Action(Rows, "gathered", BATCH),
    Action(Rows, "settle", BATCH),
    Action(kv, "evaluate", NOBODY, caller="settle"),
    Action(kv, "evaluated", NOBODY, kind="hybrid"),
    Action(kv.BatchCache, "snapshot", BATCH, kind="hybrid"),
    Action(kv.BatchCache, "marker", BATCH),
    Action(kv.BatchCache, "join", BATCH),
    Action(kv.BatchCache, "arrange", BATCH, caller="absorb"),
    Action(kv.BatchCache, "arrange", BATCH, caller="settle"),
    Action(kv.BatchCache, "arrange", BATCH, caller="settle", late=True),
    Action(LogitsHead, "last", BATCH),
    Action(LogitsHead, "last", BATCH, late=True),
    Action(prefill_passes, "first_tokens", BATCH),
    Action(prefill_passes, "first_tokens", BATCH, late=True),
    Action(DecodeBatch, "__init__", BATCH),
    Action(DecodeBatch, "join", BATCH),
    Action(mx, "concatenate", BATCH, caller="combined"),
    Action(DecodeBatch, "launch", BATCH),
    Action(DecodeBatch, "launch", BATCH, late=True),
    Action(BatchSampler, "__call__", BATCH),
    Action(BatchLogprobs, "__call__", BATCH, caller="choose"),
    Action(choosing, "fitting", BATCH, caller="read"),
    Action(Chosen, "read", BATCH, caller="read"),
    Action(Chosen, "read", BATCH, caller="__call__"),
    Action(DecodeBatch, "read", BATCH, late=True),
    Action(decode_batch, "sampled_of", BATCH),
    Action(DecodeBatch, "remove_before_read", BATCH),
    Action(DecodeBatch, "remove_before_read", BATCH, late=True),
    Action(DecodeBatch, "leave", BATCH),
    Action(DecodeBatch, "leave", BATCH, late=True),
    Action(Rows, "leave", BATCH, caller="leave"),
    Action(mx, "eval", BATCH, caller="wait"),
    Action(Chosen, "read", BATCH, caller="read_early"),
    Action(choosing, "sampled_of", BATCH, caller="read_early"),
    Action(prefill_passes, "prompt_logprobs", BATCH),
    Action(Scoring, "step", ONE),
    Action(Scoring, "step", ONE, late=True),
]


@cache
def model_of(kind: str) -> EngineModel:
    return engine_model(random_model(kind))


def submit(rounds: Rounds, number: int, ticket: int) -> None:
    if number == SCORE:
        rounds.score(ticket, SCORED)
        return
    prompt, limit, request = REQUESTS[number]
    request = {"ignore_eos": True, **request}
    if stride := request.get("grammar"):
        request["grammar"] = Strides(stride, limit // 2)
    rounds.submit(ticket, prompt, limit, **request)


@cache
def alone(kind: str, number: int) -> Received:
    rounds = Rounds(model_of(kind))
    submit(rounds, number, 1)
    rounds.drain()
    return rounds.received[1]


STEPS = 22


def run(rounds: Rounds) -> None:
    """Every path: prompts alone and together, from entries and sequences, preempted, scored."""
    begin(rounds, STEPS)
    rounds.drain(2000)
    submit(rounds, 8, 8)
    rounds.drain(2000)


def begin(rounds: Rounds, steps: int) -> None:
    arrivals = {0: (1, 2), 2: (3, 4, 10), 6: (SCORE,), 8: (6,), 16: (7,), 18: (9,)}
    limits = rounds.scheduler.planner.limits
    scarce = replace(limits, budget=4 * limits.cost.of(200))
    for step in range(steps):
        for number in arrivals.get(step, ()):
            submit(rounds, number, number)
        rounds.scheduler.planner.limits = scarce if step in (12, 21) else limits
        rounds.step()
    rounds.scheduler.planner.limits = limits


def check(rounds: Rounds, kind: str, *, most: int) -> None:
    failed = [number for number, received in rounds.received.items() if received.error is not None]
    assert len(failed) <= most, [rounds.received[number].error for number in failed]
    for number in failed:
        error = rounds.received[number].error
        assert type(error) is EngineFailed, error
    for number in rounds.received.keys() - failed:
        same(rounds.received[number], alone(kind, number))
    assert_nothing_is_left(rounds)
    submit(rounds, 7, 101)
    rounds.drain(2000)
    same(rounds.received[101], alone(kind, 7))


def same(received: Received, expected: Received) -> None:
    assert received.error is None
    assert received.finished is not None
    assert expected.finished is not None
    assert received.tokens == expected.tokens
    ours, theirs = received.finished, expected.finished
    assert ours.usage.completion_tokens == theirs.usage.completion_tokens
    tokens = [one.token for one in ours.logprobs or ()]
    assert tokens == [one.token for one in theirs.logprobs or ()]
    of_prompt, expected_of_prompt = ours.prompt_logprobs, theirs.prompt_logprobs
    assert (of_prompt is None) == (expected_of_prompt is None)
    if of_prompt is not None and expected_of_prompt is not None:
        prompt_tokens = [one.token for one in of_prompt.rest]
        assert prompt_tokens == [one.token for one in expected_of_prompt.rest]
    for ours_of, theirs_of in zip(ours.scores, theirs.scores, strict=True):
        for our, their in zip(ours_of, theirs_of, strict=True):
            assert our.token == their.token
            assert abs(our.logprob - their.logprob) < 1e-3


def assert_nothing_is_left(rounds: Rounds) -> None:
    scheduler = rounds.scheduler
    executor, planner = scheduler.executor, scheduler.planner
    assert not scheduler.busy
    assert not executor.sequences
    assert not executor.failures
    assert executor.row_bytes == 0
    assert executor._batches == {}
    assert executor.entry_bytes == planner.entries.index.nbytes
    assert len(executor._entries.by_number) == len(planner.entries.index)
    for entry, stored in executor._entries.by_number.items():
        assert len(planner.entries.index[entry].key) == len(stored.tokens)


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_the_course_takes_every_path(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # With the order of steps on a GPU, these rounds preempt too seldom.
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: True)
    rounds = Rounds(model_of(kind))
    run(rounds)
    assert not rounds.faults
    assert rounds.scheduler.planner.preemptions > 2
    check(rounds, kind, most=0)


@pytest.mark.parametrize("message", [DEFECT, NO_MEMORY], ids=["defect", "memory"])
@pytest.mark.parametrize("action", ACTIONS, ids=str)
def test_a_fault_in_an_action(
    action: Action, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (*REQUESTS, SCORE):
        alone(action.kind, number)
    for at in calls(action, message):
        with monkeypatch.context() as patch:
            rounds = Rounds(model_of(action.kind))
            trap = Trap(at, message)
            action.rig(patch, trap)
            run(rounds)
        assert trap.sprung or at, "the course never calls it"
        if not trap.sprung:
            continue
        check(rounds, action.kind, most=0 if message == NO_MEMORY else action.most)
        if not TEST_LONG:
            break


@pytest.mark.parametrize("message", [DEFECT, NO_MEMORY], ids=["defect", "memory"])
@pytest.mark.parametrize("name", PASSES)
def test_a_fault_in_a_pass(name: str, message: str) -> None:
    for at in calls(name, message):
        trap = Trap(at, message)
        model = Watched(random_model("full"), trap, PASSES[name])
        rounds = Rounds(replace(model_of("full"), model=model))
        run(rounds)
        assert trap.sprung or at, "the course never calls it"
        if not trap.sprung:
            continue
        check(rounds, "full", most=0 if message == NO_MEMORY else BATCH)
        if not TEST_LONG:
            break


# Paths that the course does not take: files, images, guesses.


class FakeDisk:
    """Files with the KV that the model computes; with `gone` they cannot be read any more."""

    writing_bytes = read_bytes = 0

    def __init__(self, model: Any, *, gone: bool = False) -> None:
        self._model, self._gone = model, gone
        self.saved = 0

    def restore(self, stored: Any, row: kv.RowCache) -> kv.RowCache | None:
        if self._gone:
            return None
        mx.eval(self._model(mx.array([stored.tokens]), cache=row))
        return row

    def save(self, *given: Any, **named: Any) -> None:
        self.saved += 1

    def has_files(self, path: Path | None) -> bool:
        return True

    def drain(self, seconds: float) -> None:
        """Do nothing: no file is being written."""


class FakeMedia:
    """A media reader for prompts without media."""

    def __init__(self) -> None:
        self.features = SimpleNamespace(size=0, clear=lambda: None)

    def begin(self, *given: Any) -> None:
        return None


def run_with_files(rounds: Rounds) -> None:
    """Two requests: one starts from a file with its whole prompt, the other from the first."""
    file = SimpleNamespace(tokens=PROMPT[:-1], length=len(PROMPT) - 1)
    disk = DiskUse(answer=True)
    rounds.submit(1, PROMPT, 30, ignore_eos=True, stored=file, disk=disk)
    longer = [*PROMPT[:60], *spread(60, 17)]
    rounds.submit(2, longer, 10, ignore_eos=True, disk=DiskUse(Path("/nowhere/file")))
    rounds.drain(2000)


def check_with_files(rounds: Rounds, *, most: int) -> None:
    failed = [number for number, received in rounds.received.items() if received.error is not None]
    assert len(failed) <= most
    plain = Rounds(model_of("full"))
    plain.submit(2, [*PROMPT[:60], *spread(60, 17)], 10, ignore_eos=True)
    plain.drain()
    for number, expected in ((1, alone("full", 1)), (2, plain.received[2])):
        if number not in failed:
            same(rounds.received[number], expected)
    assert_nothing_is_left(rounds)


def test_an_unreadable_file_is_recomputed() -> None:
    disk: Any = FakeDisk(random_model("full"), gone=True)
    rounds = Rounds(replace(model_of("full"), disk=disk))
    run_with_files(rounds)
    check_with_files(rounds, most=0)
    assert disk.saved > 1


WITH_FILES = [
    Action(FakeDisk, "restore", ONE),
    Action(FakeDisk, "save", NOBODY),
    Action(kv, "evaluate", NOBODY, caller="save"),
    Action(FakeMedia, "begin", ONE),
]


@pytest.mark.parametrize("message", [DEFECT, NO_MEMORY], ids=["defect", "memory"])
@pytest.mark.parametrize("action", WITH_FILES, ids=str)
def test_a_fault_with_files_and_media(
    action: Action, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk: Any = FakeDisk(random_model("full"))
    media: Any = FakeMedia()
    for at in calls(action, message):
        with monkeypatch.context() as patch:
            rounds = Rounds(replace(model_of("full"), disk=disk, media=media))
            trap = Trap(at, message)
            action.rig(patch, trap)
            run_with_files(rounds)
        assert trap.sprung or at, "the course never calls it"
        check_with_files(rounds, most=0 if message == NO_MEMORY else action.most)
        if not TEST_LONG:
            break


IN_GUESSING = [
    Action(Chooser, "choose", BATCH, caller="_launch_checked"),
    Action(kv.BatchCache, "begin", BATCH, caller="_launch_checked"),
    Action(kv.BatchCache, "end", BATCH, caller="_settle"),
    Action(LookupDrafter, "propose", NOBODY),
]


@pytest.mark.usefixtures("guesses_always")
@pytest.mark.parametrize("message", [DEFECT, NO_MEMORY], ids=["defect", "memory"])
@pytest.mark.parametrize("action", IN_GUESSING, ids=str)
def test_a_fault_in_guessing_costs_only_the_guesses(
    action: Action, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [3, 4, 5] * 6
    plain = Rounds(model_of("full"))
    plain.submit(1, prompt, 60, ignore_eos=True)
    plain.drain()
    for at in calls(action, message):
        with monkeypatch.context() as patch:
            drafting = Drafting(6, lambda: [LookupDrafter()])
            rounds = Rounds(replace(model_of("full"), drafting=drafting))
            trap = Trap(at, message)
            action.rig(patch, trap)
            rounds.submit(1, prompt, 60, ignore_eos=True)
            rounds.drain(2000)
        assert trap.sprung or at, "nothing is guessed"
        if not trap.sprung:
            continue
        if message == NO_MEMORY or action.most == NOBODY:
            same(rounds.received[1], plain.received[1])
        else:
            assert type(rounds.received[1].error) is EngineFailed
        assert_nothing_is_left(rounds)
        rounds.submit(2, prompt, 60, ignore_eos=True)
        rounds.drain(2000)
        same(rounds.received[2], plain.received[1])
        if not TEST_LONG:
            break


@pytest.mark.usefixtures("guesses_always")
@pytest.mark.parametrize("fails", [False, True])
def test_looking_ahead_counts_as_masking_and_may_fail(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without guesses the sequence gets the same tokens."""
    prompt = [3, 4, 5] * 6
    plain = Rounds(model_of("full"))
    plain.submit(1, prompt, 40, ignore_eos=True, grammar=Strides(0, 40))
    plain.drain()
    looked: list[int] = []

    def look_ahead(self: Strides, draft_tokens: Sequence[int], allowed: np.ndarray) -> int:
        looked.append(len(draft_tokens))
        if fails:
            raise RuntimeError(DEFECT)
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return original(self, draft_tokens, allowed)

    original = Strides.look_ahead
    monkeypatch.setattr(Strides, "look_ahead", look_ahead)
    drafting = Drafting(6, lambda: [LookupDrafter()])
    rounds = Rounds(replace(model_of("full"), drafting=drafting))
    rounds.submit(1, prompt, 40, ignore_eos=True, grammar=Strides(0, 40))
    masked: list[float] = []
    settle = rounds.scheduler.executor.settle

    def settled(*, idle: bool) -> list[Any]:
        events = settle(idle=idle)
        masked.extend(event.seconds for event in events if isinstance(event, Masked))
        return events

    monkeypatch.setattr(rounds.scheduler.executor, "settle", settled)
    rounds.drain(2000)
    assert looked
    assert not rounds.faults
    same(rounds.received[1], plain.received[1])
    assert fails or sum(masked) >= 0.01 * len(looked)


# Requests that end while a pass is in flight.


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_all_requests_can_be_cancelled_at_any_step(kind: str) -> None:
    for steps in range(1, STEPS, STRIDE):
        rounds = Rounds(model_of(kind))
        begin(rounds, steps)
        finished = {number for number, received in rounds.received.items() if received.finished}
        rounds.scheduler.cancel_all(Cancelled("over"))
        for number in rounds.received.keys() - finished:
            assert isinstance(rounds.received[number].error, Cancelled)
        assert rounds.scheduler.executor.entry_bytes == 0
        assert_nothing_is_left(rounds)
        submit(rounds, 1, 101)
        rounds.drain(2000)
        same(rounds.received[101], alone(kind, 1))


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_some_requests_can_be_cancelled_at_any_step(kind: str) -> None:
    for steps in range(1, STEPS, STRIDE):
        rounds = Rounds(model_of(kind))
        begin(rounds, steps)
        gone = set(list(rounds.received)[steps % 2 :: 2])
        for number in gone:
            rounds.scheduler.cancel(number)
        rounds.drain(2000)
        for number in rounds.received.keys() - gone:
            same(rounds.received[number], alone(kind, number))
        assert_nothing_is_left(rounds)
        assert not rounds.faults


def test_a_pass_in_flight_may_fail_after_one_of_its_requests_was_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, a pass is waited for in a later step than that in which it was launched."""
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: False)
    rounds = Rounds(model_of("full"))
    rounds.submit(1, spread(24, 7), 40, ignore_eos=True)
    while len(rounds.received[1].tokens) < 3:
        rounds.step()
    for number in (2, 3):
        rounds.submit(number, spread(12, number), 8, ignore_eos=True)
    executor = rounds.scheduler.executor
    gone, other = executor.sequences[2], executor.sequences[3]
    while not (executor.in_flight(gone) and executor.in_flight(other)):
        rounds.step()
    with monkeypatch.context() as patch:
        Action(prefill_passes.PrefillPass, "wait", ONE).rig(patch, Trap(0, DEFECT))
        rounds.scheduler.cancel(2)
        rounds.step()
    rounds.drain(2000)
    # The KV of sequence 1 is in the same batch as the result of the failed pass.
    assert all(isinstance(rounds.received[number].error, EngineFailed) for number in (1, 3))
    assert_nothing_is_left(rounds)
    submit(rounds, 4, 104)
    rounds.drain(2000)
    same(rounds.received[104], alone("full", 4))


def test_a_preempted_sequence_reports_its_prompt_logprobs_once() -> None:
    """Its second prefill also contains generated tokens, which are no part of the prompt."""
    for generated in range(1, 6):
        check_preempted(9, generated)


def test_a_constrained_sequence_is_preempted_at_any_token() -> None:
    for number in (6, 10):
        for generated in range(1, 10, STRIDE):
            check_preempted(number, generated)


def check_preempted(number: int, generated: int) -> None:
    """A request that is preempted after that many tokens, beside one that outlasts it."""
    rounds = Rounds(model_of("full"))
    rounds.submit(4, spread(24, 7), 200)
    rounds.step()
    submit(rounds, number, number)
    while len(rounds.received[number].tokens) < generated:
        rounds.step()
    limits = rounds.scheduler.planner.limits
    rounds.scheduler.planner.limits = replace(limits, budget=limits.cost.of(200))
    rounds.step()
    rounds.scheduler.planner.limits = limits
    rounds.drain(2000)
    assert rounds.scheduler.planner.preemptions == 1
    same(rounds.received[number], alone("full", number))


def test_a_grammar_accepts_the_sent_tokens_again_after_a_preemption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the step that fails, the grammar has accepted a token that is never delivered."""
    for number in (6, 10):
        for at in range(1, 10, STRIDE):
            with monkeypatch.context() as patch:
                trap = Trap(at, NO_MEMORY)
                Action(DecodeBatch, "read", ONE, late=True).rig(patch, trap)
                rounds = Rounds(model_of("full"))
                submit(rounds, number, number)
                rounds.drain(2000)
            assert trap.sprung
            same(rounds.received[number], alone("full", number))
