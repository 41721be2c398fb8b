"""A step does the same work however many prompts are stored, and dropping them all takes no longer.

Work is counted in bytecode instructions, in a scheduler that runs a real model.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.counted_work import instructions
from tests.engine.kv_models import kv_model, words
from tests.engine.random_models import VOCABULARY
from tests.engine.rounds import Rounds, engine_model

FEW, MANY = 40, 200


@dataclass
class Work:
    """Instructions. dropping: of a step that drops all entries, beyond a step that drops none."""

    step: int
    status: int
    ending: int
    dropping: int


@pytest.mark.usefixtures("counted_clock")
@pytest.mark.parametrize("kind", ["attention", "gated delta"])
def test_work_does_not_grow_with_the_stored_prompts(kind: str) -> None:
    _work(kind, FEW)  # Python 3.13 counts only a part of a function's first call that is traced
    few, many = _work(kind, FEW), _work(kind, MANY)
    added = MANY - FEW
    # A loop over the entries takes several instructions for each.
    assert many.step - few.step < added
    assert many.status - few.status < added
    assert many.ending - few.ending < added
    assert many.dropping <= 1.2 * MANY / FEW * few.dropping


def _prompt(number: int) -> list[int]:
    return [*divmod(number, VOCABULARY), *words(30, number)]


def _work(kind: str, entries: int) -> Work:
    rounds = Rounds(engine_model(kv_model(kind), max_cache_entries=entries))
    for ticket in range(1, entries + 1):
        rounds.submit(ticket, _prompt(ticket), 1)
    rounds.drain()
    stored = rounds.scheduler.planner.entries.index
    kept = rounds.scheduler.executor._entries.by_number
    assert len(stored) == entries == len(kept)
    before = set(kept)

    rounds.submit(1001, words(20, 7), 400, ignore_eos=True)
    for _ in range(10):
        rounds.step()
    step = min(instructions(rounds.step) for _ in range(10))
    status = instructions(rounds.scheduler.memory)

    # The next prompt's entry takes the place of another.
    rounds.submit(1002, _prompt(entries + 1), 1)
    for _ in range(10):
        rounds.step()
        if rounds.received[1002].finished:
            break
    ending = sum(instructions(rounds.step) for _ in range(3))
    assert len(stored) == entries == len(kept)
    assert len(before - kept.keys()) == 1

    rounds.scheduler.shed()
    dropping = instructions(rounds.step) - step
    assert len(stored) == 0 == rounds.scheduler.executor.entry_bytes
    return Work(step, status, ending, dropping)
