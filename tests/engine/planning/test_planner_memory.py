"""What the planner guarantees about memory: cases that the simulation found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend.engine.planning.pace import SMALLEST_STEP
from backend.engine.planning.plan import (
    Arrived,
    CacheCost,
    Ended,
    Generated,
    Limits,
    Lost,
    Masked,
    MemoryShort,
    OtherBytes,
    PassCost,
    PlannerEvent,
    Prefilled,
    PrefillTimed,
    Started,
    Stored,
)
from backend.engine.planning.planner import Planner
from backend.engine.planning.prefix_index import PrefixKey


def limits(budget: int, **changes: object) -> Limits:
    settings: dict[str, object] = {
        "cost": CacheCost(1, 0),
        "slots": 8,
        "budget": budget,
        "prompt_cache": budget,
        "max_entries": 0,
        "prefill_chunk": 512,
        "stall_ms": 250.0,
    }
    return Limits(**(settings | changes))  # type: ignore[arg-type]


def arrived(number: int, tokens: list[int]) -> Arrived:
    return Arrived(number, PrefixKey(tokens), tokens, limit=512)


def test_an_entry_that_a_sequence_starts_from_is_removed_in_a_later_step() -> None:
    stored = list(range(1, 1001))
    planner = Planner(limits(2560 + 500))
    planner.entries.index.add(7, PrefixKey(stored), 1024)
    continued = arrived(1, [*stored[:600], *range(5000, 5100)])
    other = arrived(2, list(range(9000, 9700)))
    plan = planner.plan(0.0, [continued, other])
    assert [(start.sequence, start.source is not None) for start in plan.start] == [(1, True)]
    assert plan.evict == ()
    later = planner.plan(0.1, [])
    assert later.evict == (7,)
    assert [start.sequence for start in later.start] == [2]


HYBRID = CacheCost(per_token=1, fixed=2000)


def test_snapshots_of_running_sequences_are_charged() -> None:
    """With 512 bytes of KV each, snapshots of 2000 bytes are what fills the memory."""
    planner = Planner(limits(20_000, cost=HYBRID, trims=False))
    plan = planner.plan(0.0, [arrived(number, [number] * 200) for number in range(1, 8)])
    rows = sum(HYBRID.of(one.charged) for one in planner.sequences.admitted.values())
    wanted = sum(len(one.positions) for one in planner.sequences.admitted.values())
    assert plan.start
    assert rows + wanted * 2000 <= 20_000


def test_snapshots_for_sequences_that_wait_for_a_prefix_take_only_memory_that_is_free() -> None:
    """Otherwise the sequence that computes the prefix would be preempted for them."""
    budget = HYBRID.of(4000 + 512) + HYBRID.fixed + 9500  # a pass has each state twice
    planner = Planner(limits(budget, cost=HYBRID, trims=False, slots=16))
    tokens = list(range(4000))
    plan = planner.plan(0.0, [arrived(1, tokens)])
    others = [
        arrived(number, [*tokens[: 600 + number * 20], *[number] * (500 - number * 20)])
        for number in range(2, 14)
    ]
    events: list[PlannerEvent] = [Started(1, 0), *others]
    events += [Prefilled(1, part.end) for group in plan.prefill for part in group]
    planner.plan(0.1, events)
    (long,) = (one for one in planner.sequences.admitted.values() if one.number == 1)
    assert HYBRID.of(long.charged) + long.wanted_snapshots * 2000 <= budget
    assert long.wanted_snapshots > 1
    assert planner.plan(0.2, []).preempt == ()


def test_the_turns_of_a_conversation_do_not_pile_up_snapshots() -> None:
    planner = Planner(limits(1 << 30, cost=HYBRID, trims=False))
    tokens = list(range(5000))
    key = PrefixKey(tokens)
    planner.entries.index.add(7, key, 100_000, positions=range(100, 5000, 100))
    plan = planner.plan(0.0, [arrived(1, [*tokens, 1, 2, 3])])
    (start,) = plan.start
    assert start.source is not None
    assert start.source.length == 5000
    assert 0 < len(start.snapshots) <= 5


def test_snapshots_of_an_entry_that_was_lost_are_forgotten() -> None:
    planner = Planner(limits(1 << 30, cost=HYBRID, trims=False))
    tokens = list(range(500))
    planner.entries.index.add(7, PrefixKey(tokens), 10_000, positions=(200, 400))
    assert planner.plan(0.0, [arrived(1, [*tokens[:400], 1, 2])]).start[0].snapshots
    planner.plan(0.1, [Started(1, 0)])
    planner.entries.clear()
    planner.plan(0.2, [Prefilled(1, 401)])
    plan = planner.plan(0.3, [Generated({1: (1,)}), arrived(2, [*tokens[:300], 3])])
    assert [start.source for start in plan.start] == [None]


@pytest.mark.parametrize(("spare", "snapshots"), [(1999, 0), (2000, 1)])
def test_snapshots_fit_beside_the_entry_that_is_copied(spare: int, snapshots: int) -> None:
    entry = 5000
    budget = HYBRID.of(600 + 512) + HYBRID.fixed + entry + spare
    planner = Planner(limits(budget, cost=HYBRID, trims=False))
    tokens = list(range(1000))
    planner.entries.index.add(7, PrefixKey(tokens), entry, positions=(500,))
    (start,) = planner.plan(0.0, [arrived(1, [*tokens[:500], *[3] * 100])]).start
    assert start.source is not None
    one = planner.sequences.by_number[1]
    assert len(one.snapshots) + one.wanted_snapshots == snapshots
    assert planner.free_for_texts >= 0


def test_an_entry_that_is_larger_than_the_prompt_cache_is_dropped_alone() -> None:
    planner = Planner(limits(1 << 20, prompt_cache=2000))
    planner.entries.index.add(7, PrefixKey([7] * 500), 512)
    planner.plan(0.0, [replace(arrived(1, [1] * 300), limit=9)])
    planner.plan(0.1, [Started(1, 0), Prefilled(1, 300)])
    (leave,) = planner.plan(0.2, [Ended(1)]).leave
    assert leave.entry is not None
    plan = planner.plan(0.3, [Stored(leave.entry, 300, (), 2001, None)])
    assert plan.evict == (leave.entry,)
    assert planner.entries.unstored == 1


def test_bytes_that_will_soon_be_freed_refuse_no_sequence() -> None:
    planner = Planner(limits(2000))
    plan = planner.plan(0.0, [OtherBytes(1000), arrived(1, [1] * 1000)])
    assert (plan.start, plan.refuse) == ((), ())
    plan = planner.plan(0.1, [OtherBytes(0)])
    assert [start.sequence for start in plan.start] == [1]


def test_sequences_give_up_memory_for_a_text_in_one_step() -> None:
    planner = Planner(limits(3000))
    assert planner.plan(0.0, [arrived(1, [1] * 1000)]).start
    waits = arrived(2, [2] * 1000)
    plan = planner.plan(0.1, [OtherBytes(0, texts=3000), PrefillTimed(512, 0.5), waits])
    assert (plan.start, plan.preempt) == ((), ())
    assert planner.free_for_texts < 3000
    later = OtherBytes(1, texts=3000)  # the same time again
    assert planner.plan(2.0, [later]).preempt == ()  # twice the second that the prompt takes
    planner.plan(2.0, [OtherBytes(0, texts=3000)])
    plan = planner.plan(2.2, [])
    assert ([leave.sequence for leave in plan.preempt], plan.start) == ([1], ())
    assert planner.free_for_texts == 3000
    plan = planner.plan(2.3, [OtherBytes(0)])
    assert [start.sequence for start in plan.start] == [1]
    assert planner.sequences.by_number[2].least == SMALLEST_STEP


def test_entries_give_way_to_a_text_that_can_then_run() -> None:
    planner = Planner(limits(3000))
    planner.entries.index.add(7, PrefixKey([1] * 1000), 1024)
    plan = planner.plan(0.0, [arrived(1, [2] * 500), OtherBytes(0, texts=2500)])
    assert plan.evict == ()
    assert planner.plan(0.1, [OtherBytes(0, texts=1500)]).evict == (7,)
    assert planner.free_for_texts >= 1500


def test_what_was_read_from_disk_is_dropped_before_a_sequence_is_preempted() -> None:
    planner = Planner(limits(3000))
    plan = planner.plan(0.0, [arrived(1, [1] * 1000)])
    assert [start.sequence for start in plan.start] == [1]
    waits = replace(arrived(2, [2] * 1000), on_disk=900)
    plan = planner.plan(0.1, [waits, OtherBytes(0, files=2000)])
    assert (plan.preempt, plan.start, plan.unread) == ((), (), (2,))


def test_a_file_that_was_being_read_when_others_were_dropped_counts_once_it_is_read() -> None:
    planner = Planner(limits(3000))
    assert planner.plan(0.0, [arrived(1, [1] * 1000)]).start
    assert planner.plan(0.1, [OtherBytes(0, files=2000)]).preempt == ()
    waits = replace(arrived(2, [2] * 1000), on_disk=900)
    assert planner.plan(0.2, [waits]).unread == (2,)


def test_a_disk_that_never_finishes_writing_keeps_no_sequence_waiting_for_ever() -> None:
    planner = Planner(limits(3000))
    assert planner.plan(0.0, [arrived(1, [1] * 1000)]).start
    waits = arrived(2, [2] * 1000)
    plan = planner.plan(0.1, [Ended(1, failed=True), OtherBytes(2000), waits])
    for now, written in ((50.0, 1999), (109.0, 1999)):
        plan = planner.plan(now, [OtherBytes(written)])
        assert (plan.start, plan.refuse) == ((), ())
    (refused,) = planner.plan(111.0, [arrived(3, [3] * 100)]).refuse
    assert (refused.sequence, refused.writing) == (2, 1999)
    assert 3 in planner.sequences.admitted


def test_a_sequence_whose_prompt_cannot_go_on_beside_such_bytes_is_refused() -> None:
    passes = PassCost(per_token=100)
    planner = Planner(limits(3000, passes=passes))
    assert planner.plan(0.0, [arrived(1, [1] * 1000)]).start
    planner.plan(0.1, [Started(1, 0), OtherBytes(2000)])
    plan = planner.plan(60.0, [])
    assert (plan.prefill, plan.refuse) == ((), ())
    (refused,) = planner.plan(60.2, []).refuse
    assert (refused.sequence, refused.writing) == (1, 2000)
    assert not planner.sequences.admitted


def test_sequences_that_lost_their_memory_start_again_one_after_the_other() -> None:
    planner = Planner(limits(1 << 20))
    numbers = [1, 2, 3]
    planner.plan(0.0, [arrived(number, [number] * 300) for number in numbers])
    planner.plan(0.1, [Started(number, 0) for number in numbers])
    planner.plan(0.2, [Prefilled(number, 300) for number in numbers])
    lost = [Lost(number) for number in numbers]
    plan = planner.plan(0.25, [MemoryShort(), *lost, arrived(4, [4] * 300)])
    assert [start.sequence for start in plan.start] == [1, 4]
    assert planner.plan(0.3, [Started(1, 0), Started(4, 0)]).start == ()
    plan = planner.plan(0.4, [Prefilled(1, 300), Prefilled(4, 300)])
    assert ([join.sequence for join in plan.join], plan.start) == ([1, 4], ())
    assert [start.sequence for start in planner.plan(0.5, []).start] == [2]


def test_a_file_is_dropped_for_the_sequence_that_can_start() -> None:
    planner = Planner(limits(2000))
    both = [replace(arrived(number, [number] * 1000), on_disk=900) for number in (1, 2)]
    plan = planner.plan(0.0, [OtherBytes(0, files=1800), *both])
    assert plan.unread == (2,)
    (start,) = plan.start
    assert start.sequence == 1
    assert start.source is not None
    assert start.source.kind == "disk"


def test_features_are_dropped_for_a_sequence() -> None:
    planner = Planner(limits(2000))
    plan = planner.plan(0.0, [OtherBytes(0, features=1000), arrived(1, [1] * 1000)])
    assert [start.sequence for start in plan.start] == [1]
    assert plan.features == 2000 - 1536


def test_passes_shrink_as_attention_scores_grow() -> None:
    """At 4,000 tokens a pass of 512 would need 2 MB for attention scores, where 1 MB is left."""
    passes = PassCost(per_pair=1.0)
    planner = Planner(limits(5000 + (1 << 20), prefill_chunk=512, passes=passes))
    events: list[PlannerEvent] = [PrefillTimed(512, 0.01), arrived(1, [1] * 4000)]
    sizes: list[int] = []
    now = 0.0
    while not planner.sequences.of("decode"):
        plan = planner.plan(now, events)
        events = [Started(start.sequence, 0) for start in plan.start]
        for part in (part for group in plan.prefill for part in group):
            sizes.append(part.end - part.start)
            assert sizes[-1] * part.end <= 1 << 20
            events.append(Prefilled(1, part.end))
        now += 0.1
    assert sizes[0] == 512
    assert SMALLEST_STEP <= min(sizes[:-1]) < 512


def test_a_lone_sequence_is_prefilled_token_by_token_rather_than_refused() -> None:
    passes = PassCost(per_token=100)
    kv = CacheCost(1, 0).of(300 + 512)
    planner = Planner(limits(kv + 100 + 150, passes=passes))
    plan = planner.plan(0.0, [arrived(1, [1] * 300)])
    assert [part.end for group in plan.prefill for part in group] == [1]


@pytest.mark.parametrize(("spare", "rows"), [(0, {}), (768, {1: 4})])
def test_unused_rows_take_only_memory_that_is_free(spare: int, rows: dict[int, int]) -> None:
    planner = Planner(limits(1 << 20, prompt_cache=0))
    numbers = (1, 2, 3)
    starts = planner.plan(0.0, [arrived(number, [number] * 200) for number in numbers]).start
    planner.plan(0.1, [Started(start.sequence, 0) for start in starts])
    planner.limits = replace(planner.limits, budget=3 * 768 + spare)
    plan = planner.plan(0.2, [Prefilled(number, 200) for number in numbers])
    assert plan.decode == {1: 3}
    assert plan.rows == rows


def test_rows_stay_until_a_quarter_of_them_is_spare() -> None:
    planner = Planner(limits(1 << 20))
    events: list[PlannerEvent] = [arrived(number, [number] * 200) for number in range(1, 9)]
    while len(planner.sequences.of("decode")) < 8:
        plan = planner.plan(0.0, events)
        events = [Started(start.sequence, 0) for start in plan.start]
        events += [Prefilled(each.sequence, each.end) for group in plan.prefill for each in group]
    depths = [planner.plan(0.1, [Ended(number)]).rows.get(1) for number in range(1, 8)]
    assert depths == [8, 8, 6, 5, 4, 2, None]


@pytest.mark.parametrize(("spare", "draft_tokens"), [(3999, {}), (4100, {1: 4})])
def test_the_states_from_before_a_step_with_guesses_are_charged_for(
    spare: int, draft_tokens: dict[int, int]
) -> None:
    """The 4000 bytes are a row's state from before the step, and its mixture with the new one."""
    planner = Planner(limits(1 << 20, cost=HYBRID, trims=False, draft_tokens=4, prompt_cache=0))
    planner.widths.choose = lambda rows, longest, most: most  # type: ignore[method-assign]
    one = replace(arrived(1, [1] * 200), draft_tokens=4)
    start = planner.plan(0.0, [one]).start[0]
    planner.plan(0.1, [Started(start.sequence, 0)])
    planner.limits = replace(planner.limits, budget=HYBRID.of(200 + 512) + spare)
    assert planner.plan(0.2, [Prefilled(1, 200)]).draft == draft_tokens


@pytest.mark.parametrize("slots", [1, 8])
def test_what_can_never_fit_is_refused_at_once_although_others_run(slots: int) -> None:
    """Otherwise the sequence would wait for them, and after a while block all behind it."""
    planner = Planner(limits(3000, slots=slots))
    planner.plan(0.0, [arrived(1, [1] * 200)])
    plan = planner.plan(0.1, [arrived(2, [2] * 3000), arrived(3, [3] * 200)])
    assert [refusal.sequence for refusal in plan.refuse] == [2]
    assert [leave.sequence for leave in plan.leave] == [2]
    assert 3 in planner.sequences.by_number


def test_a_postponed_sequence_that_gave_up_its_memory_is_preempted_once() -> None:
    planner = Planner(limits(3000))
    first, second = (arrived(number, [number] * 200) for number in (1, 2))
    planner.plan(0.0, [first, second])
    planner.plan(0.1, [Started(1, 0), Started(2, 0)])
    assert sum(planner.plan(0.2, [Prefilled(1, 200), Prefilled(2, 200)]).decode.values()) == 2
    plenty = planner.limits
    planner.limits = replace(plenty, budget=1000)
    plan = planner.plan(0.3, [Masked(2, 0.5, postponed=True)])
    assert [leave.sequence for leave in plan.preempt] == [2]
    planner.limits = plenty
    assert [start.sequence for start in planner.plan(0.4, []).start] == [2]
    assert planner.plan(0.5, [Started(2, 0)]).preempt == ()


def test_a_plan_holds_until_the_longest_of_a_batch_needs_more_kv() -> None:
    """The others have as many columns as the longest anyway."""
    planner = Planner(limits(1 << 20))
    lengths = {number: 10 + 7 * number for number in range(1, 9)}
    events: list[PlannerEvent] = [
        replace(arrived(number, [number] * length), limit=4096)
        for number, length in lengths.items()
    ]
    while len(planner.sequences.of("decode")) < 8:
        plan = planner.plan(0.0, events)
        events = [Started(start.sequence, 0) for start in plan.start]
        events += [Prefilled(part.sequence, part.end) for group in plan.prefill for part in group]
    assert len(plan.decode) == 1
    most = limits(1 << 20).budget
    plans = set()
    for _ in range(300):
        plan = planner.plan(0.0, [Generated(dict.fromkeys(lengths, (1,)))])
        plans.add(plan.number)
        longest = max(one.charged for one in planner.sequences.of("decode"))
        assert planner.unused <= most - 8 * CacheCost(1, 0).of(longest)
    assert 2 <= len(plans) <= 4


def _decoding(budget: int, *events: PlannerEvent, **changes: object) -> Planner:
    """A planner whose only sequence decodes, after a prompt of 256 tokens and one more."""
    planner = Planner(limits(budget, prompt_cache=0, **changes))
    planner.plan(0.0, [replace(arrived(1, [1] * 256), limit=4096)])
    planner.plan(0.0, [Started(1, 0), Prefilled(1, 256)])
    planner.plan(0.0, [Generated({1: (1,)}), *events])
    return planner


@pytest.mark.parametrize(("lacking", "lasts"), [(0, True), (1, False)])
def test_a_plan_lasts_if_the_growth_of_its_passes_fits(lacking: int, lasts: bool) -> None:
    """254 more tokens need no more KV, but a pass attends to each of them, which takes a byte."""
    planner = _decoding(1 << 20, passes=PassCost(per_pair=1.0))
    budget = planner.limits.budget - planner.free_for_texts - lacking
    planner.limits = replace(planner.limits, budget=budget)
    planner.plan(0.0, [Generated({1: (1,)})])
    assert planner.free_for_texts == (0 if lasts else 254 - lacking)
    assert planner.lasts(254) is lasts


def test_no_plan_lasts_while_a_text_waits_for_its_turn() -> None:
    """Time alone can begin the turn."""
    planner = _decoding(4000, OtherBytes(0, texts=3800))
    assert planner.free_for_texts > 256
    assert not planner.lasts(1)
    assert planner.plan(2.0, [Generated({1: (1,)})]).preempt


def test_a_plan_lasts_although_grammars_have_exceeded_their_share() -> None:
    planner = _decoding(1 << 20, Masked(1, 5.0))
    assert planner.masks.owed > 0
    assert planner.lasts(1)


def test_a_sequence_that_fits_beside_a_running_one_is_admitted() -> None:
    """Its KV is copied array by array when it joins a batch, so no second copy has to fit."""
    planner = Planner(limits(2 * 1024))
    planner.plan(0.0, [arrived(1, [1] * 300)])
    planner.plan(0.1, [Started(1, 0), Prefilled(1, 300)])
    plan = planner.plan(0.2, [Generated({1: (1,)}), arrived(2, [2] * 300)])
    assert [start.sequence for start in plan.start] == [2]
