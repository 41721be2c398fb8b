"""The number of guesses follows measured costs and gains; it is 0 where guessing saves no time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from backend.engine.planning.draft_width import WIDTHS, DraftWidth
from backend.engine.planning.plan import Drafted

Cost = Callable[[int], float]  # seconds of a step, by the guesses for each sequence


class Play:
    """Simulates decoding without a model: each guess after a right one is right by chance.

    cost: seconds of a step, by its width. chance: the probability that a guess is right."""

    def __init__(self, cost: Cost, chance: float, rows: int = 1, most: int = 8) -> None:
        self.widths = DraftWidth(most)
        self.cost, self.chance, self.rows, self.most = cost, chance, rows, most
        self.dice = random.Random(1)
        self.before = -1
        self.unreported = 0  # steps that `widths` does not know yet
        self.behind = 0  # steps until the guesser has caught up
        self.length = 100

    def run(self, tokens: int) -> tuple[float, list[int]]:
        """Seconds for that many tokens of each sequence, and the widths that were chosen."""
        seconds, chosen, done = 0.0, list[int](), 0.0
        while done < tokens:
            rests = self.widths.skip(self.rows)
            width = 0 if rests else self.widths.choose(self.rows, self.length, self.most)
            right = [self._right(width) for _ in range(self.rows)]
            behind = 0
            if width and self.behind:
                self.behind -= 1
                right, behind = [0] * self.rows, self.rows
            took = self.cost(width) * self.dice.uniform(0.97, 1.03)
            proposed = 0 if behind else width * self.rows
            if not rests:
                step = (self.rows, self.length, width, proposed, tuple(right), took, behind)
                self.widths.learn(Drafted(*step))
            self.unreported += rests
            self.before = width
            seconds += took
            chosen.append(width)
            done += 1 + sum(right) / self.rows
        return seconds / done * tokens, chosen

    def _right(self, width: int) -> int:
        return next((at for at in range(width) if self.dice.random() >= self.chance), width)


def flat(width: int) -> float:
    """The time of a step on a GPU with compute to spare."""
    return 0.02 * (1 + 0.02 * width)


def steep(width: int) -> float:
    """The time of a step in which each token costs nearly as much as a whole step."""
    return 0.02 * (1 + 0.95 * width)


def dear(width: int) -> float:
    """The time of a step in which each token costs more than a whole step (new experts)."""
    return 0.02 * (1 + 1.5 * width)


@pytest.mark.parametrize("chance", [0.3, 0.6, 1.0])
def test_guesses_that_cannot_pay_cost_next_to_nothing(chance: float) -> None:
    """Even right guesses are slower than plain steps here, so a test of them ends immediately."""
    assert Play(dear, chance).run(800)[0] < 1.02 * 800 * dear(0)


@pytest.mark.parametrize("ratio", [2, 10, 40])
@pytest.mark.parametrize("chance", [0.0, 0.9, 1.0])
def test_a_draft_model_slower_than_its_model_is_left_alone(ratio: int, chance: float) -> None:
    """After a few steps that measure it, later trials take about a hundredth of the time."""

    def slow(width: int) -> float:
        return 0.02 * (1 + ratio * width)

    play = Play(slow, chance)
    _, chosen = play.run(100)
    assert sum(width > 0 for width in chosen) <= 4
    assert play.run(4000)[0] < 1.03 * 4000 * slow(0)


def test_a_trial_takes_its_steps() -> None:
    """The first of four is not timed, so the choice rests on the times of three plain steps."""
    play = Play(flat, 0.9)
    chosen = play.run(60)[1]
    assert chosen[:5] == [0, 0, 0, 0, 1]
    assert play.run(2000)[1].count(8) > 200
    seconds = next(iter(play.widths._seconds.values()))
    assert all(mean.count >= 2 for mean in seconds.values())


def test_a_busy_moment_at_the_start_is_forgotten() -> None:
    """Drafting seems to save time after slow plain steps, until plain steps are timed again."""
    play = Play(lambda width: 2 * steep(width), 0.5)
    play.run(6)
    play.cost = steep
    assert play.run(2000)[0] < 1.03 * 2000 * steep(0)


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("cost", [flat, steep])
def test_it_is_near_the_best_fixed_width_and_never_slower_than_none(
    cost: Cost, chance: float, rows: int
) -> None:
    seconds, _ = Play(cost, chance, rows).run(2000)
    expected = {
        width: cost(width) / sum(chance**at for at in range(width + 1))
        for width in WIDTHS
        if width <= 8
    }
    assert seconds / 2000 < 1.12 * min(expected.values())
    assert seconds / 2000 < 1.03 * expected[0]


def test_guesses_that_nearly_pay_do_not_alternate_with_plain_steps() -> None:
    """The first step with guesses takes longer: the guesser reads what it has missed."""

    def cost(width: int) -> float:
        missed = 1.5 if play.before == 0 else 0.0
        return 0.02 * (1 + 0.3 + 0.35 * width + missed) if width else 0.02

    play = Play(cost, 0.6)
    assert play.run(4000)[0] < 1.02 * 4000 * 0.02


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("missed", [5, 20])
@pytest.mark.parametrize("chance", [0.0, 0.6])
def test_the_time_in_which_guessers_catch_up_counts_as_time_of_a_test(
    chance: float, missed: int, rows: int
) -> None:
    """Besides the steps that are timed, the one before them and the plain one after them count."""

    def cost(width: int) -> float:
        slower = 1.8 * width if width else 0.0
        return 0.02 * (1 + slower + (missed if (width > 0) != (play.before > 0) else 0))

    play = Play(cost, chance, rows)
    play.run(200)
    assert play.run(4000)[0] < 1.02 * 4000 * 0.02


@pytest.mark.parametrize("chance", [0.9, 1.0])
def test_steps_with_guesses_that_were_slow_once_are_timed_again(chance: float) -> None:
    """A busy moment must not end guessing for good."""

    def usual(width: int) -> float:
        return 0.02 * (1 + 0.2 * width)

    play = Play(lambda width: 0.02 * (1 + 3 * width), chance)
    play.run(20)
    play.cost = usual
    play.run(1000)
    chosen = play.run(500)[1]
    assert sum(width > 0 for width in chosen) > 0.8 * len(chosen)


@pytest.mark.parametrize("rows", [1, 8])
def test_tests_that_keep_failing_become_rarer(rows: int) -> None:
    play = Play(dear, 0.4, rows)
    play.run(2000)
    seconds, chosen = play.run(8000)
    assert any(chosen)
    assert seconds < 1.004 * 8000 * dear(0)
    play.chance, play.cost = 0.95, flat
    play.run(2500)
    assert max(play.run(100)[1]) == 8


def test_predictable_text_is_noticed() -> None:
    play = Play(flat, 0.0)
    assert set(play.run(600)[1][-100:]) <= {0, 1, 2}
    play.chance = 0.95
    play.run(600)
    assert max(play.run(100)[1]) == 8


def test_a_guesser_that_has_yet_to_catch_up_is_not_judged() -> None:
    """A draft model reads a long prompt in chunks, one per step in which it is asked."""
    play = Play(lambda width: 0.02 * (1 + 0.25 * width), 0.95)
    play.behind = 20
    chosen = play.run(100)[1]
    assert play.behind == 0
    assert max(chosen) >= 4


def test_a_guesser_that_never_catches_up_costs_next_to_nothing() -> None:
    play = Play(steep, 0.95)
    play.behind = 10**6
    play.run(100)
    assert play.run(4000)[0] < 1.03 * 4000 * steep(0)


def test_a_slower_machine_is_noticed() -> None:
    play = Play(flat, 0.7)
    assert play.run(600)[1][-1] > 0
    play.cost = steep
    play.run(600)
    chosen = play.run(600)[1]
    assert sum(width == 0 for width in chosen) > 0.8 * len(chosen)


def test_while_guesses_are_given_up_few_steps_are_reported() -> None:
    play = Play(steep, 0.0)
    play.run(200)
    before = play.unreported
    _, chosen = play.run(800)
    assert play.unreported - before > 0.8 * len(chosen)
    # For another number of sequences, `choose` decides immediately.
    assert play.widths.skip(2) == 0


def test_while_guesses_pay_every_step_is_reported() -> None:
    play = Play(flat, 0.9)
    play.run(400)
    before = play.unreported
    play.run(400)
    assert play.unreported == before


def test_the_same_events_give_the_same_widths() -> None:
    assert Play(flat, 0.6).run(500) == Play(flat, 0.6).run(500)


def test_no_width_exceeds_what_fits() -> None:
    play = Play(flat, 0.95, most=3)
    play.widths = DraftWidth(64)
    assert max(play.run(500)[1]) == 2


def test_the_report_has_the_gain() -> None:
    play = Play(flat, 0.9)
    play.run(500)
    report = play.widths.report
    assert report.width == 8
    assert 0.6 < report.accepted / report.proposed < 0.9
    assert 3 < report.gain < 6
