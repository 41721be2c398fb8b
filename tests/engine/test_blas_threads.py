"""The number of BLAS threads follows what the machine gives, and trials stay rare."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from backend.engine.blas_threads import BlasThreads, ThreadChoice

QUIET = {1: 1.0, 2: 0.75}
BUSY = {1: 1.5, 2: 6.0}


def _run(choice: ThreadChoice, machine: dict[int, float], steps: int, noise: float = 0.1) -> float:
    """Time of so many steps, in units of a step with the best number."""
    dice = random.Random(1)
    total = 0.0
    for _ in range(steps):
        taken = machine[choice.threads] * dice.uniform(1, 1 + noise)
        total += taken
        choice.measured(8, taken)
    return total / steps / min(machine.values())


def test_a_quiet_machine_gets_all_cores_and_a_busy_one_a_single_thread() -> None:
    for machine, best in ((QUIET, 2), (BUSY, 1)):
        choice = ThreadChoice([2, 1])
        _run(choice, machine, 300)
        settled = [choice.threads for _ in range(40) if choice.measured(8, machine[choice.threads])]
        assert settled.count(best) > 20


def test_trials_cost_little_even_where_the_other_number_collapses() -> None:
    for machine in (QUIET, BUSY):
        choice = ThreadChoice([2, 1])
        _run(choice, machine, 400)
        assert _run(choice, machine, 4000) < 1.12


def test_neighbours_that_come_and_go_are_noticed_within_some_steps() -> None:
    choice = ThreadChoice([2, 1])
    _run(choice, QUIET, 3000)
    _run(choice, BUSY, 60)
    assert _run(choice, BUSY, 400) < 1.3
    _run(choice, QUIET, 2500)
    assert _run(choice, QUIET, 400) < 1.2


def test_a_change_of_width_begins_a_trial_anew_and_compares_like_with_like() -> None:
    choice = ThreadChoice([2, 1])
    dice = random.Random(2)
    used: list[int] = []
    for step in range(4000):
        width = 1 + step // 7 % 4
        used.append(choice.threads)
        choice.measured(width, QUIET[choice.threads] * width * dice.uniform(1, 1.05))
    assert used.count(2) > 0.7 * len(used)


def test_the_number_is_set_only_when_it_changes() -> None:
    applied: list[int] = []
    remember: Callable[[int], object] = applied.append
    threads = BlasThreads(ThreadChoice([2, 1]), remember)
    for _ in range(500):
        threads.measured(1, QUIET[applied[-1]])
    assert applied[0] == 2
    assert all(one != other for one, other in itertools.pairwise(applied))
