"""Rows with costly grammars pause, so that the others in the batch do not wait for every mask."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
import pytest

from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import DraftRequest
from backend.engine.executing import choosing
from backend.engine.planning.draft_width import DraftWidth
from backend.engine.planning.mask_share import MaskShare
from backend.engine.planning.plan import Masked
from common.chat_format import ChatFormat
from tests.common.grammar_walks import byte_tokenizer
from tests.engine.constraints.walks import allowed_ids, compiler_for
from tests.engine.kv_models import kv_model
from tests.engine.planning.test_planner import OneAtATime, World, limits_of, run_until
from tests.engine.random_models import random_model
from tests.engine.rounds import MIB, Rounds, alone, engine_model
from tests.engine.test_parity import check_schedule

pytestmark = pytest.mark.usefixtures("each_order")

SECONDS = 0.02


class Costly:
    """Allows every token but the end, and takes that much processor time for each."""

    ended = False

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self.fills = 0

    def restart(self, tokens: Sequence[int]) -> None: ...

    def accept(self, token: int) -> None: ...

    def fill(self, allowed: np.ndarray) -> None:
        self.fills += 1
        until = time.thread_time() + self._seconds
        while time.thread_time() < until:
            pass
        allowed[:] = 0xFFFFFFFE

    def look_ahead(self, draft_tokens: Sequence[int], allowed: np.ndarray) -> int:
        return 0


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_a_plain_row_continues_while_costly_ones_pause(kind: str) -> None:
    prompts = {number: [number, *range(20, 45)] for number in range(1, 5)}
    model = engine_model(random_model(kind), stall_ms=50)
    rounds = Rounds(model)
    # Measured in processor time, which a busy machine does not change.
    rounds.scheduler.executor._times.clock = time.thread_time
    rules = {number: Costly() for number in range(2, 5)}
    rounds.submit(1, prompts[1], 3000, ignore_eos=True)
    for number, rule in rules.items():
        rounds.submit(number, prompts[number], 3, grammar=rule)
    while any(rounds.received[number].finished is None for number in rules):
        rounds.step()
    # If sequence 1 waited for all masks of the others, it would have about as many tokens as they.
    assert len(rounds.received[1].tokens) > 20
    assert rounds.received[1].finished is None or len(rounds.received[1].tokens) == 3000
    assert not rounds.faults
    for number in rules:
        lone = alone(model, prompts[number], 3, grammar=Costly(0))
        assert rounds.received[number].tokens == lone.tokens
    rounds.scheduler.cancel(1)
    rounds.drain()


class Turning(Costly):
    """Costs nothing until `turned` is set, then three masks are costly."""

    def __init__(self) -> None:
        super().__init__(0)
        self.turned = False
        self.costly_fills = 0

    def fill(self, allowed: np.ndarray) -> None:
        costly = self.turned and self.costly_fills < 3
        self.costly_fills += costly
        self._seconds = SECONDS / 2 if costly else 0
        super().fill(allowed)


class Guesses:
    """Guesses the same tokens for every row."""

    nbytes = 0

    def propose(self, asked: Sequence[DraftRequest]) -> list[list[int] | None]:
        return [[7, 7][: one.most] for one in asked]

    def forget(self, sequences: Collection[int]) -> None: ...


@pytest.mark.parametrize(
    ("cheap", "guessed"), [(4, False), (4, True), (0, False)], ids=["step", "guesses", "first"]
)
def test_rows_that_turn_costly_at_once_do_not_share_one_step(
    cheap: int, guessed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain row waits for those masks that fit into a step; the other rows pause."""
    monkeypatch.setattr(DraftWidth, "choose", lambda *_: 2)
    drafting = Drafting(2, lambda: [Guesses()]) if guessed else None
    model = engine_model(random_model("full"), stall_ms=10, drafting=drafting, slots=7)
    rounds = Rounds(model)
    # Measured in processor time, which a busy machine does not change.
    rounds.scheduler.executor._times.clock = time.thread_time
    rules = {number: Turning() for number in range(2, 8)}
    rounds.submit(1, [1, *range(20, 45)], 3000, ignore_eos=True)
    while not rounds.received[1].tokens:
        rounds.step()
    for number, rule in rules.items():
        rounds.submit(number, [number, *range(20, 45)], 40, grammar=rule)
    fills = [0]
    while any(rule.costly_fills < 3 for rule in rules.values()):
        if all(rule.fills >= cheap for rule in rules.values()):
            for rule in rules.values():
                rule.turned = True
        rounds.step()
        assert rounds.received[1].finished is None  # otherwise no row waits for the masks
        fills.append(sum(rule.costly_fills for rule in rules.values()))
    # The limit is two stalls, 20 ms: after two masks of 10 ms a third exceeds it, then no more run.
    assert 0 < max(after - before for before, after in pairwise(fills)) <= 3
    rounds.scheduler.cancel(1)
    rounds.drain()
    assert not rounds.faults
    for number in rules:
        lone = alone(model, [number, *range(20, 45)], 40, grammar=Costly(0))
        assert rounds.received[number].tokens == lone.tokens


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("guessed", [False, True])
def test_postponed_rows_get_the_same_tokens_as_alone(
    seed: int, guessed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every step with a plain row, each grammar after the first one is postponed."""
    monkeypatch.setattr(choosing, "_MOST_STALLS", 0)
    monkeypatch.setattr(DraftWidth, "choose", lambda *_: 2)
    drafting = Drafting(2, lambda: [Guesses()]) if guessed else None
    model = engine_model(kv_model("attention"), slots=8, drafting=drafting)
    plain = engine_model(kv_model("attention"), slots=8)
    assert check_schedule(model, seed, plain)["rows preempted"]


@pytest.mark.parametrize("cache", [64 * MIB, 0])
def test_rows_that_are_all_costly_do_not_pause(cache: int) -> None:
    """No row would gain; without a prompt cache, a paused row would be recomputed."""
    rounds = Rounds(engine_model(random_model("full"), prompt_cache_bytes=cache, stall_ms=50))
    rounds.scheduler.executor._times.clock = time.thread_time
    rules = {number: Costly() for number in range(1, 5)}
    for number, rule in rules.items():
        rounds.submit(number, [number, *range(20, 45)], 5, grammar=rule)
    if not cache:
        rounds.submit(5, [5, *range(20, 45)], 9, ignore_eos=True)
    while rounds.scheduler.busy:
        rounds.step()
        assert not any(one.generated for one in rounds.scheduler.planner.sequences.of("waiting"))
    assert all(received.finished is not None for received in rounds.received.values())


def test_many_quick_grammars_keep_nobody_waiting() -> None:
    """They exceed the share of grammars together; pausing a single costly one would not help."""
    masks = MaskShare(pause=0.05)
    masks.masked(0.5)
    for _ in range(100):
        masks.decoded(0.3)
        for _ in range(100):
            masks.masked(0.0019)
    assert masks.owed == 0


def test_only_as_many_sequences_pause_as_must() -> None:
    masks = MaskShare(pause=0.05)
    masks.masked(0.5)
    masks.decoded(1.0)
    assert masks.too_costly({1: 0.3, 2: 0.05, 3: 0.0}) == [1]


def test_of_sequences_that_pause_one_resumes_at_a_time() -> None:
    world = World(limits_of(slots=3), OneAtATime(1))
    costly = {world.arrive([salt] * 20, 1500) for salt in (1, 2)}
    plain = world.arrive([3] * 20, 1500)
    run_until(world, lambda: len(world.planner.sequences.of("decode")) == 3)
    world.events += [Masked(number, 0.2) for number in costly]
    world.step()
    assert list(world.planner.sequences.admitted) == [plain]
    run_until(world, lambda: len(world.planner.sequences.admitted) > 1)
    assert len(costly & world.planner.sequences.admitted.keys()) == 1


def test_a_costly_sequence_does_not_pause_for_sequences_in_prefill() -> None:
    world = World(limits_of(slots=3, prefill_chunk=32))
    plain, costly = world.arrive([1] * 20, 1500), world.arrive([2] * 20, 1500)
    run_until(world, lambda: len(world.planner.sequences.of("decode")) == 2)
    world.events.append(Masked(costly, 5.0))
    long = world.arrive([3] * 1500, 5)
    world.step()
    run_until(world, lambda: world.planner.sequences.by_number[long].filled > 100)
    assert costly not in world.planner.sequences.admitted
    world.cancel(plain)
    world.step()
    assert world.planner.sequences.by_number[long].state == "prefill"
    assert costly in world.planner.sequences.admitted


@pytest.mark.parametrize("limit", ['stop="."', "max_tokens=9"])
def test_a_grammar_that_counts_tokens_can_start_again(limit: str) -> None:
    """llguidance's own reset refuses grammars with such limits."""
    tokenizer = byte_tokenizer()
    a, b, c = tokenizer.backend_tokenizer.encode("abc").ids
    compiler = compiler_for(tokenizer, ChatFormat.named("plain"))
    text = f'start: text "z"\ntext[{limit}]: /[a-c.]*/'
    constraint = compiler.compile(ConstraintSpec("lark", text))
    for token in (a, b, c):
        constraint.accept(token)
    constraint.restart([a])
    assert {a, b, c} <= set(allowed_ids(constraint, tokenizer.size))


def test_a_resumed_grammar_reads_no_token_twice() -> None:
    tokenizer = byte_tokenizer()
    a, b, c, d = tokenizer.backend_tokenizer.encode("abcd").ids
    compiler = compiler_for(tokenizer, ChatFormat.named("plain"))
    constraint = compiler.compile(ConstraintSpec("lark", 'start: "ab" ("c" | "d")'))
    constraint.accept(a)
    constraint.accept(b)
    before = constraint.allowance
    constraint.restart([a, b])
    assert constraint.allowance == before
    assert allowed_ids(constraint, tokenizer.size) == [c, d]
    constraint.restart([a])
    assert constraint.allowance != before
    assert allowed_ids(constraint, tokenizer.size) == [b]
