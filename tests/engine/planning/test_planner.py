"""The planner against an executor of plain lists, over thousands of random courses of events."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from backend.engine.planning.plan import (
    Arrived,
    CacheCost,
    Limits,
    Lost,
    MemoryShort,
    PassCost,
    PlannerEvent,
    Prefilled,
    Source,
    StepPlan,
)
from backend.engine.planning.planner import Planner
from backend.engine.planning.prefix_index import PrefixKey
from backend.engine.planning.sequence_state import SequenceState
from tests.engine.fake_executor import FakeExecutor, Faults
from tests.long import TEST_LONG

STEP = 256  # tokens by which KV grows, and so the least that is charged
PER_TOKEN = 10  # bytes
COURSES = 125 if TEST_LONG else 60  # of a test


FREE = PassCost()


def limits_of(**changes: Any) -> Limits:
    settings: dict[str, Any] = {
        "cost": CacheCost(PER_TOKEN, 0),
        "slots": 4,
        "budget": 100 * STEP * PER_TOKEN,
        "prompt_cache": 20 * STEP * PER_TOKEN,
        "max_entries": 0,
        "prefill_chunk": 128,
        "stall_ms": 250.0,
    }
    return Limits(**(settings | changes))


@dataclass
class World:
    """A planner, its executor, and all plans and events between them."""

    limits: Limits
    dice: random.Random = field(default_factory=lambda: random.Random(None if TEST_LONG else 0))
    faults: Faults = field(default_factory=Faults)
    now: float = 0.0
    bases: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.planner = Planner(self.limits)
        self.executor = FakeExecutor(self.limits, self.dice, self.faults)
        self.events: list[PlannerEvent] = []
        self.course: list[tuple[float, tuple[PlannerEvent, ...], StepPlan]] = []
        self.numbers = 0
        self.empty = 0
        self.texts: list[int] = []  # bytes that the texts that wait to be embedded need
        self.embedded: list[float] = []  # when texts were embedded
        self.waiting_since = self.patience = 0.0

    def arrive(
        self,
        tokens: Sequence[int],
        limit: int = 5,
        *,
        key: Sequence[int] | None = None,
        ends_at: int = 1 << 30,
        score_steps: int = 3,
        **fields: Any,
    ) -> int:
        self.numbers += 1
        key = tokens if key is None else key
        arrived = Arrived(self.numbers, PrefixKey(key), tuple(tokens), limit, **fields)
        self.executor.add(arrived, ends_at, score_steps)
        self.events.append(arrived)
        return self.numbers

    def cancel(self, number: int) -> None:
        self.events += self.executor.cancel(number)

    def step(self) -> StepPlan:
        events, self.events = tuple(self.events), []
        plan = self.planner.plan(self.now, events)
        self.course.append((self.now, events, plan))
        self.check(plan)
        self.events += self.executor.follow(plan, self.planner.free_for_texts)
        self.now += self.executor.seconds or 0.001
        self.embed()
        return plan

    def embed(self) -> None:
        """Run the text that waits longest if there is memory for it, as the engine thread does."""
        needed = self.texts[0] if self.texts else 0
        lacking = needed if needed > self.planner.free_for_texts else 0
        if lacking != self.executor.lacking:
            self.executor.lacking = lacking
            self.events += self.executor.weigh(self.executor.other)
        if self.texts and (not lacking or not (self.events or self.planner.busy)):
            self.texts.pop(0)
            self.embedded.append(self.now)
        self.check_wait(lacking)

    def check_wait(self, lacking: int) -> None:
        """A text waits for twice the time that the tokens in memory take, at most."""
        if not lacking or lacking + self.executor.other > self.limits.budget:
            self.waiting_since, self.patience = self.now, 0.0
            return
        tokens = sum(one.total for one in self.planner.sequences.admitted.values())
        speed = self.planner.pace.tokens_per_second or float("inf")
        self.patience = max(self.patience, 1.0, 2 * tokens / speed)
        assert self.now - self.waiting_since <= self.patience + 2.0, "a text waits for too long"

    def check(self, plan: StepPlan) -> None:
        alive = self.executor.sequences.keys() - self.executor.ended.keys()
        refused = {refusal.sequence for refusal in plan.refuse}
        assert self.planner.sequences.by_number.keys() == alive - refused
        states = [
            {one.number for one in self.planner.sequences.of(s)}
            for s in ("waiting", "prefill", "decode")
        ]
        assert set.union(*states) == self.planner.sequences.by_number.keys()
        assert sum(map(len, states)) == len(self.planner.sequences.by_number)
        preempted = {leave.sequence for leave in plan.preempt}
        assert preempted <= states[0]
        running = {one.number for one in self.executor.running} - self.executor.ended.keys()
        assert running - preempted - refused | {start.sequence for start in plan.start} == (
            states[1] | states[2]
        )
        assert self.planner.entries.index.nbytes <= self.limits.prompt_cache
        self.check_rows(plan)
        waits = plan == StepPlan(plan.number) and not self.executor.other
        self.empty = self.empty + 1 if waits and self.planner.busy else 0
        assert self.empty < 3, "nothing is done, and somebody waits"

    def check_rows(self, plan: StepPlan) -> None:
        """Spare rows take at most a quarter of a batch's rows, and only memory that is free."""
        spare = 0
        for number, rows in plan.rows.items():
            members = self.planner.sequences.batches()[number]
            assert len(members) <= rows <= max(len(members) / 0.75, len(members) + 1)
            longest = max(one.charged for one in members)
            spare += (rows - len(members)) * self.limits.cost.of(longest)
        assert not spare or self.planner.free_for_texts >= 0

    def drain(self, most: int = 20_000) -> None:
        """Step until nothing is left to do and all pending removals are done."""
        if self.executor.other:
            self.events += self.executor.weigh(0)
        for _ in range(most):
            if not (self.events or self.planner.busy or self.texts):
                break
            self.step()
        else:
            raise AssertionError(f"still busy after {most} steps")
        assert not self.executor.sequences
        assert len(self.executor.ended) == self.numbers
        assert len(self.planner.entries.index) == len(self.executor.entries)
        for entry, stored in self.executor.entries.items():
            assert len(self.planner.entries.index[entry].key) == len(stored.kv)

    def replayed(self) -> list[StepPlan]:
        planner = Planner(self.limits)
        return [planner.plan(now, events) for now, events, _ in self.course]


def random_arrival(world: World) -> None:
    dice = world.dice
    base = dice.choice(world.bases)
    if world.executor.texts and dice.random() < 0.4:
        base = list(dice.choice(world.executor.texts[-4:]))
    tokens = [abs(token) for token in base[: dice.choice([0, 3, 20, 40, 90, 300, 1500])]]
    tokens += [dice.randrange(7) for _ in range(dice.choice([0, 1, 5, 40]))]
    tokens = tokens or [1]
    key = list(tokens)
    fields: dict[str, Any] = {}
    if dice.random() < 0.2 and len(tokens) > 12:  # one of two images
        start = dice.choice([2, 5])
        stop = min(start + dice.choice([6, 60]), len(tokens) - 1)
        key[start:stop] = [-1 - dice.randrange(2)] * (stop - start)
        tokens[start:stop] = [6] * (stop - start)
        fields |= {"spans": ((start, stop),), "alone": True, "whole": start == 5}
    elif dice.random() < 0.2 and len(tokens) > 12:
        fields["on_disk"] = dice.randrange(1, len(tokens))
    limit = dice.choice([1, 2, 9, 60, 700, 1500])
    if dice.random() < 0.15:
        fields["joins"] = False
    elif dice.random() < 0.15:
        fields |= {"joins": False, "scores": True, "width": 1 + dice.randrange(1, 9)}
    if dice.random() < 0.1:
        fields |= {"fresh": True, "alone": True}
        fields.pop("on_disk", None)
    if dice.random() < 0.2:
        fields["beside"] = dice.choice([1, 10, 1000]) * PER_TOKEN
    if "spans" in fields:
        fields["encodes"] = dice.choice([0, 100, 3000]) * PER_TOKEN
        fields["features"] = dice.choice([0, 1, 3]) * PER_TOKEN
    if dice.random() < 0.3 and len(tokens) > 1:
        fields["positions"] = (dice.randrange(1, len(tokens)),)
    world.arrive(
        tokens,
        limit,
        key=key,
        draft_tokens=dice.choice([0, 4]),
        ends_at=dice.choice([1, 3, 30, 1 << 30]),
        score_steps=dice.randrange(1, 5),
        **fields,
    )


def random_limits(dice: random.Random) -> Limits:
    unit = STEP * PER_TOKEN
    slots = dice.choice([1, 2, 3, 6, 12])
    trims = dice.random() < 0.5
    cost = CacheCost(PER_TOKEN, 0)
    if not trims:
        windowed = CacheCost(PER_TOKEN // 2, 0, ((PER_TOKEN // 2, 32),))
        cost = dice.choice([CacheCost(PER_TOKEN, 1), CacheCost(PER_TOKEN, 40), windowed])
    return limits_of(
        cost=cost,
        slots=slots,
        budget=dice.choice([8, 20, 40, 200]) * unit,
        prompt_cache=dice.choice([0, 2, 5, 30]) * unit,
        max_entries=dice.choice([0, 0, 1, 4]),
        prefill_chunk=dice.choice([32, 128, 512]),
        stall_ms=dice.choice([20.0, 250.0]),
        together=slots > 1 and dice.random() < 0.8,
        trims=trims,
        passes=dice.choice(
            [FREE, FREE, PassCost(40, 0, 7), PassCost(3, 0.25, 20, 0.5), PassCost(1, 2)]
        ),
        draft_tokens=4,
    )


NEVER = Faults()
SOMETIMES = Faults(short_start=0.3, short_prefill=0.1, unstored=0.1, lost=0.01, failed=0.01)


def test_no_snapshot_for_another_prompt_is_inside_an_image() -> None:
    """Its pass would end where it begins."""
    random_course(94766)


@pytest.mark.parametrize("seed", [300049, 400209, 402104])
def test_bytes_for_texts_are_free_beside_files_and_lost_sequences(seed: int) -> None:
    """A file's KV stays until its sequence starts; a sequence lost at its start shares no pass."""
    random_course(seed)


def random_course(seed: int, **limits: Any) -> World:
    dice = random.Random(seed)
    world = World(replace(random_limits(dice), **limits), dice, dice.choice([NEVER, SOMETIMES]))
    world.bases = [[dice.randrange(7) for _ in range(1500)] for _ in range(dice.choice([1, 3]))]
    for _ in range(dice.choice([2, 6, 14])):
        for _ in range(dice.choice([1, 1, 6])):
            random_arrival(world)
        for _ in range(dice.choice([0, 1, 2, 10])):
            if dice.random() < 0.05:
                world.cancel(dice.randint(1, world.numbers))
            if world.faults is SOMETIMES and dice.random() < 0.02:
                world.events.append(MemoryShort())
            if dice.random() < 0.1:
                others = [0, world.limits.budget // 8, world.limits.budget // 2]
                world.events += world.executor.weigh(dice.choice(others), dice.choice(others))
            if dice.random() < 0.1:
                world.texts.append(dice.randint(1, world.limits.budget))
            world.step()
    world.drain()
    return world


@pytest.mark.parametrize("start", range(0, 1000 if TEST_LONG else 60, COURSES))
def test_every_course_of_events_ends_well_and_can_be_replayed(start: int) -> None:
    for seed in range(start, start + COURSES):
        try:
            world = random_course(seed)
            assert world.replayed() == [plan for _, _, plan in world.course]
        except Exception as fault:
            fault.add_note(f"seed {seed}")
            raise


def test_a_plan_that_is_returned_again_is_what_would_be_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    courses = [random_course(seed, draft_tokens=0) for seed in range(COURSES)]
    monkeypatch.setattr(Planner, "_tokens_until_change", lambda self, plan: -1)
    again = 0
    for seed, world in enumerate(courses):
        plans = [plan for _, _, plan in world.course]
        again += sum(one is other for one, other in pairwise(plans))
        decided = [replace(plan, number=0) for plan in world.replayed()]
        assert decided == [replace(plan, number=0) for plan in plans], f"seed {seed}"
    assert again > 100


# One example for each rule.


def numbered(count: int, salt: int = 0) -> list[int]:
    """Tokens that share no prefix with those of another salt."""
    return [salt, *((at * at + at) % 91 for at in range(count - 1))]


def run_until(world: World, reached: Callable[[], bool]) -> None:
    for _ in range(2000):
        if reached():
            return
        world.step()
    raise AssertionError("still not reached after 2000 steps")


def run_until_over(world: World, *numbers: int) -> None:
    run_until(world, lambda: world.executor.ended.keys() >= set(numbers))


def sources(world: World, number: int) -> list[Source | None]:
    return [
        start.source
        for _, _, plan in world.course
        for start in plan.start
        if start.sequence == number
    ]


def test_a_pass_that_begins_and_ends_inside_images_has_memory_for_the_features_of_all() -> None:
    spans = tuple((start, start + 30) for start in range(5, 305, 30))
    image: dict[str, Any] = {"spans": spans, "alone": True, "features": 3 * PER_TOKEN}

    def run(budget: int) -> World:
        world = World(limits_of(budget=budget, prompt_cache=0))
        run_until_over(world, world.arrive(numbered(310), **image))
        return world

    (refusal,) = run(1).course[0][2].refuse
    longest = set()
    for budget in range(refusal.needed, refusal.needed + 1000 * PER_TOKEN, 5 * PER_TOKEN):
        passes = [group for _, _, plan in run(budget).course for group in plan.prefill]
        longest.add(max(group[0].end - group[0].start for group in passes))
    assert longest >= {16, 32, 64, 128}


def test_a_refused_sequence_ends_in_the_same_step() -> None:
    world = World(limits_of(budget=2 * STEP * PER_TOKEN))
    number = world.arrive(numbered(900))
    plan = world.step()
    assert [refusal.sequence for refusal in plan.refuse] == [number]
    assert [leave.sequence for leave in plan.leave] == [number]


def test_a_file_is_used_once() -> None:
    world = World(limits_of())
    number = world.arrive(numbered(300), on_disk=200)
    world.step()
    world.events.append(Lost(number))
    world.executor.sequences[number].reset()
    world.drain()
    assert sources(world, number) == [Source("disk", 0, 200), None]


def test_a_sequence_that_found_less_than_planned_is_prefilled_first() -> None:
    world = World(limits_of(), faults=Faults(short_start=1.0))
    world.arrive(numbered(200), on_disk=199)
    plan = world.step()
    assert [(part.start, part.end) for group in plan.prefill for part in group] == [(199, 200)]
    plan = world.step()
    assert not plan.join
    assert [part.start for group in plan.prefill for part in group] == [0]
    world.drain()


def test_padding_in_a_batch_keeps_no_sequence_out() -> None:
    unit = STEP * PER_TOKEN
    world = World(limits_of(budget=8 * unit, prompt_cache=0))
    world.arrive(numbered(600, 1), 600)
    run_until(world, lambda: bool(world.planner.sequences.of("decode")))
    world.arrive(numbered(20, 2), 100)
    run_until(world, lambda: len(world.planner.sequences.of("decode")) > 1)
    assert len({one.batch for one in world.planner.sequences.of("decode")}) == 2
    world.drain()
    assert world.planner.preemptions == 0


def test_the_end_of_an_entry_is_not_a_snapshot() -> None:
    world = World(limits_of(trims=False, cost=CacheCost(PER_TOKEN, 40), max_entries=1))
    prompt = numbered(301)
    run_until_over(world, world.arrive(prompt, 20, ends_at=10))
    world.step()
    (entry,) = world.executor.entries.values()
    conversation = list(entry.kv)
    going_on = world.arrive([*conversation, 5, 6, 7], 400)
    run_until(world, lambda: bool(world.planner.sequences.of("decode")))
    assert [source and source.length for source in sources(world, going_on)] == [len(conversation)]
    world.planner.entries.clear()
    other = world.arrive([*conversation, 8, 8, 8], 3)
    run_until_over(world, other)
    known = world.executor.sequences[going_on].snapshots
    assert all(source is None or source.length in known for source in sources(world, other))
    world.drain()


def test_a_short_prompt_waits_a_step_for_the_entry_that_serves_it() -> None:
    world = World(limits_of())
    first = world.arrive(numbered(30))
    run_until_over(world, first)
    again = world.arrive(numbered(30))
    run_until_over(world, again)
    assert sources(world, again) == [Source("entry", 1, 29)]


def test_an_image_that_is_being_prefilled_is_not_cut() -> None:
    world = World(limits_of(prefill_chunk=32))
    tokens = numbered(60)
    key = [*tokens[:20], *([-7] * 30), *tokens[50:]]
    image: dict[str, Any] = {"key": key, "spans": ((20, 50),), "alone": True}
    first = world.arrive(tokens, 4000, **image)
    run_until(world, lambda: bool(world.planner.sequences.of("decode")))
    second = world.arrive(tokens, **image, fresh=True)
    run_until(
        world,
        lambda: any(
            isinstance(event, Prefilled) and event.sequence == second and 20 < event.filled < 50
            for event in world.events
        ),
    )
    world.executor.sequences[first].reset()
    world.events.append(Lost(first))
    world.step()
    assert sources(world, first) == [None, Source("sequence", 2, 20)]


def test_a_prompt_waits_for_the_snapshot_where_it_parts_from_another() -> None:
    world = World(limits_of(trims=False, cost=CacheCost(PER_TOKEN, 40)))
    common = numbered(230)
    world.arrive([*common, 1, 1])
    second = world.arrive([*common, 2, 2, 2])
    world.drain()
    assert [source and source.length for source in sources(world, second)] == [len(common)]


def test_a_prompt_does_not_wait_for_that_of_a_score() -> None:
    world = World(limits_of())
    world.arrive(numbered(300), joins=False, scores=True, width=3)
    world.step()
    second = world.arrive(numbered(200))
    assert second in {start.sequence for start in world.step().start}


def test_an_entry_that_covers_a_prompt_counts_as_used() -> None:
    world = World(limits_of(max_entries=2))
    for salt in (1, 2):
        run_until_over(world, world.arrive(numbered(50, salt), joins=False))
        world.step()
    run_until_over(world, world.arrive(numbered(50, 1), joins=False, fresh=True))
    run_until_over(world, world.arrive(numbered(50, 3), joins=False))
    world.drain()
    again = world.arrive(numbered(50, 1), joins=False)
    world.drain()
    assert [source and source.length for source in sources(world, again)] == [49]


def test_an_entry_that_two_sequences_need_is_moved_to_the_last_of_them() -> None:
    world = World(limits_of())
    run_until_over(world, world.arrive(numbered(200), 1))
    world.step()
    (entry,) = world.executor.entries.values()
    first, second = (world.arrive([*entry.kv, token], 1) for token in (1, 2))
    world.drain()
    copied, moved = (Source("entry", 1, len(entry.kv), move) for move in (False, True))
    assert sources(world, first) == [copied]
    assert sources(world, second) == [moved]


def test_scoring_that_lacked_memory_gets_its_whole_width_later() -> None:
    unit = STEP * PER_TOKEN
    world = World(limits_of(budget=20 * unit, prompt_cache=0))
    running = world.arrive(numbered(10, 1), 4000)
    run_until(world, lambda: bool(world.planner.sequences.of("decode")))
    world.events += world.executor.weigh(16 * unit)
    scoring = world.arrive(numbered(100, 2), 100, joins=False, scores=True, width=9)
    world.step()
    assert [one.number for one in world.planner.sequences.of("waiting")] == [scoring]
    world.cancel(running)
    world.events += world.executor.weigh(0)
    world.step()
    assert [one.width for one in world.planner.sequences.of("prefill")] == [9]
    world.drain()


def test_long_continuations_are_charged_in_full() -> None:
    unit = STEP * PER_TOKEN
    world = World(limits_of(budget=8 * unit, prompt_cache=0))
    number = world.arrive(numbered(100), 4000, joins=False, scores=True, width=2)
    assert [refusal.sequence for refusal in world.step().refuse] == [number]


def test_short_prompts_of_similar_length_share_a_pass() -> None:
    world = World(limits_of(prefill_chunk=512))
    run_until_over(world, world.arrive(numbered(100, 9)))  # the pace is known from here on
    for salt, length in enumerate([20, 25, 30, 35]):
        world.arrive(numbered(length, salt))
    plan = world.step()
    assert [len(group) for group in plan.prefill] == [4]
    world.drain()


SCORES: dict[str, Any] = {"joins": False, "scores": True, "width": 9}


@pytest.mark.parametrize(("budget", "fields"), [(200, {}), (12, {}), (16, SCORES)])
def test_a_steady_stream_of_short_prompts_does_not_starve_a_long_one(
    budget: int, fields: dict[str, Any]
) -> None:
    unit = STEP * PER_TOKEN
    world = World(limits_of(slots=3, budget=budget * unit, prompt_cache=0))
    for salt in range(3):
        world.arrive(numbered(20, salt), 40)
    world.step()
    long = world.arrive(numbered(1500, 99), 5, **fields)
    arrived = world.now
    salt = 3
    while long not in world.executor.ended:
        if len(world.planner.sequences.of("waiting")) < 5:
            world.arrive(numbered(20 + salt % 9, salt), 100 + 37 * (salt % 5))
            salt += 1
        world.step()
        assert world.now - arrived < 60
    assert salt > 20
    world.drain()


def test_prompts_and_scoring_take_turns() -> None:
    world = World(limits_of())
    scoring = world.arrive(numbered(50, 1), 50, joins=False, scores=True, score_steps=300)
    run_until(world, lambda: world.executor.sequences[scoring].scores_left < 290)
    short = world.arrive(numbered(90, 2), 1)
    for _ in range(12):
        world.step()
    assert short in world.executor.ended
    assert world.executor.sequences[scoring].scores_left < 287
    world.drain()


class OneAtATime(random.Random):
    """Every decode step gives each sequence one token."""

    def choice(self, options: Any) -> Any:
        return options[0]


def test_texts_that_need_all_memory_share_the_time_with_sequences() -> None:
    """Texts get memory only after twice the time that it takes to compute the prompt again."""

    def run(texts: int) -> tuple[float, World]:
        world = World(limits_of(budget=14 * STEP * PER_TOKEN, prompt_cache=0), OneAtATime(1))
        stream = world.arrive(numbered(500, 1), 500)
        run_until(world, lambda: bool(world.planner.sequences.of("decode")))
        world.texts = [world.limits.budget] * texts
        newcomer, since = 0, world.now
        while stream not in world.executor.ended:
            if newcomer in world.executor.ended or not newcomer:
                newcomer, since = world.arrive(numbered(20, 2 + world.numbers), 5), world.now
            world.step()
            assert world.now - since < 3
        return world.now, world

    undisturbed, _ = run(0)
    shared, world = run(1000)
    assert len(world.embedded) > 2
    assert shared < 3 * undisturbed


class Unlisted(dict[int, SequenceState]):
    """A table that may be asked for one sequence, but not searched."""

    def _refuse(self) -> Any:
        raise AssertionError("all sequences were looked at")

    __iter__ = items = values = _refuse


def test_a_cancelled_sequence_costs_the_same_however_many_wait() -> None:
    """Thousands may be cancelled in one step, while others stream."""
    world = World(limits_of())
    for _ in range(3):
        world.arrive(range(40))
    world.step()
    table = world.planner.sequences
    table.by_number = Unlisted(table.by_number)
    assert table.remove(2) is not None
    assert len(table.by_number) == 2
