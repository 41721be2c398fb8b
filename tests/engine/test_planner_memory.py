"""What the planner promises of memory: found by the simulation, one case each."""

from __future__ import annotations

from backend.engine.plan import Arrived, CacheCost, Limits
from backend.engine.planner import Planner
from backend.engine.prefix_index import PrefixKey


def limits(room: int, **changes: object) -> Limits:
    settings: dict[str, object] = {
        "cost": CacheCost(1, 0),
        "slots": 8,
        "room": room,
        "prompt_cache": room,
        "max_entries": 0,
        "prefill_chunk": 512,
        "stall_ms": 250.0,
    }
    return Limits(**(settings | changes))  # type: ignore[arg-type]


def arrived(number: int, tokens: list[int]) -> Arrived:
    return Arrived(number, PrefixKey(tokens), tokens, limit=512)


def test_an_entry_that_a_sequence_starts_from_goes_in_a_later_step() -> None:
    stored = list(range(1, 1001))
    planner = Planner(limits(3328 + 500))
    planner.index.add(7, PrefixKey(stored), 1024)
    continued = arrived(1, [*stored[:600], *range(5000, 5100)])
    other = arrived(2, list(range(9000, 9700)))
    plan = planner.plan(0.0, [continued, other])
    assert [(start.sequence, start.source is not None) for start in plan.start] == [(1, True)]
    assert plan.evict == ()
    later = planner.plan(0.1, [])
    assert later.evict == (7,)
    assert [start.sequence for start in later.start] == [2]
