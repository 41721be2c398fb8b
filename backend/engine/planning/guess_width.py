"""Decides how many guesses a decode step may check, from measured costs and gains.

Plain Python without MLX, like the planner, which uses it: times are arguments, so the same events
always give the same widths. How much longer a step with guesses takes than a plain one depends on
the machine, the model, and the number and length of its sequences; how many tokens it gains depends
on the text. Both are measured, and the width with the most tokens per second is used, which may be
0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTHS = (0, 1, 2, 4, 8, 16, 32, 64)
MOST_AGAIN = 8  # tokens that a step with guesses feeds a sequence once more

_GAIN = 1.03  # minimum gain over plain steps that makes up for the uneven times of guessing
_TRIAL = 4  # steps with a width that has not been timed; the first of them is not counted
_LOOK = 2  # the same if the steps only test whether guesses are right again
_REFRESH = 256  # steps with guesses after which plain ones are timed again
_SHORTEST_REST = 32  # plain steps between two such tests
_LONGEST_REST = 256
_PRIOR = 0.6  # assumed probability that a guess after a right one is right, until it is measured
_MEMORY = 24  # measurements over which times are averaged
_TEXT = 32  # the same for right guesses of one sequence; limited because the text changes
_LEAST_TEXT = 12
_OUTLIER = 3.0  # multiple of the average; longer times count as this


@dataclass(slots=True)
class _Mean:
    """An average of the latest measurements."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float, memory: int) -> None:
        self.count = min(self.count + 1, memory)
        self.value += (value - self.value) / self.count


@dataclass(frozen=True, slots=True)
class GuessReport:
    """The current state of drafting.

    width: guesses that a step may check for each sequence. proposed, accepted: guesses since the
    load. gain: measured tokens per second, relative to plain steps. guessers: their names, for
    logs.
    """

    width: int = 0
    proposed: int = 0
    accepted: int = 0
    gain: float = 1.0
    guessers: str = ""


class GuessWidth:
    """Costs and gains of steps with guesses, for one loaded model. most: guesses at a time."""

    def __init__(self, most: int) -> None:
        self._widths = [width for width in WIDTHS if width <= most]
        # Seconds of a step, by number and length of sequences, then by width.
        self._seconds: dict[tuple[int, int], dict[int, _Mean]] = {}
        # The share of sequences in a step whose first guess was right, whose second was, and so on.
        self._first_right_shares = [_Mean() for _ in range(most)]
        self._tested = 0  # number of guesses for which the latest steps measured these shares
        # the width being tried, and the remaining steps of the trial
        self._trial: tuple[int, int] = (0, 0)
        self._plain = self._guessing = 0  # steps since the other kind was last tried
        self._rest = _SHORTEST_REST
        self.report = GuessReport()

    def choose(self, rows: int, longest: int, most: int) -> int:
        """The width of the next step of `rows` sequences.

        longest: their greatest length in tokens. most: how many guesses fit into memory.
        """
        known = self._known(rows, longest)
        width = max(each for each in self._widths if each <= min(self._decide(known), most))
        if width:
            self._plain, self._guessing = 0, self._guessing + 1
        else:
            self._plain += 1
        self.report = GuessReport(
            width, self.report.proposed, self.report.accepted, self._gain(known, width)
        )
        return width

    def learn(
        self,
        rows: int,
        longest: int,
        width: int,
        proposed: int,
        right: Sequence[int],
        seconds: float,
    ) -> None:
        """Record a finished step.

        width: as chosen. proposed: guesses of all sequences. right: for each sequence, how many
        guesses were right. seconds: since the previous step if that had the same width; 0 if
        unknown.
        """
        if seconds:
            known = self._known(rows, longest)
            mean = known.setdefault(width, _Mean())
            most = _OUTLIER * mean.value if mean.count else seconds
            mean.add(min(seconds, most), _MEMORY)
        if not width:
            return
        self._extend(width)
        self._tested = width
        for at in range(width):
            share = sum(count > at for count in right) / max(rows, 1)
            self._first_right_shares[at].add(share, max(_TEXT // max(rows, 1), _LEAST_TEXT))
        if sum(right) >= proposed > 0:
            self._rest = _SHORTEST_REST
            # a test continues as long as guesses are right
            self._trial = width, max(self._trial[1], 1)
        was = self.report
        self.report = GuessReport(
            was.width, was.proposed + proposed, was.accepted + sum(right), was.gain
        )

    def _decide(self, known: Mapping[int, _Mean]) -> int:
        width, left = self._trial
        if left:
            self._trial = width, left - 1
            return width
        if known.get(0, _Mean()).count < _TRIAL - 1:
            return self._try(0)
        if self._guessing >= _REFRESH:
            self._guessing = 0
            return self._try(0)
        best = max(self._widths, key=lambda width: (self._rate(known, width), -width))
        if best and self._gain(known, best) >= (_GAIN if self._plain else 1):
            return best if best in known else self._try(best)
        if self._plain < self._rest:
            return 0
        self._rest = min(2 * self._rest, _LONGEST_REST)
        self._plain = 0
        for mean in self._first_right_shares:
            mean.count = min(mean.count, _LOOK)  # the text may have changed
        guessing = [width for width in self._widths if width]
        best = max(guessing, key=lambda width: (self._rate(known, width), -width), default=0)
        return self._try(best, _LOOK)

    def _try(self, width: int, steps: int = _TRIAL) -> int:
        self._trial = width, steps - 1
        return width

    def _rate(self, known: Mapping[int, _Mean], width: int) -> float:
        """Tokens per second and sequence; 0 for widths not timed yet, except the next one."""
        timed = [each for each in self._widths if each in known]
        if width in known:
            seconds = known[width].value
        elif width == min((w for w in self._widths if w not in known), default=-1):
            # An additional guess is assumed to cost as much as those before.
            most = max(timed)
            slope = (known[most].value - known[0].value) / most if most else 0.0
            seconds = known[most].value + max(slope, 0.0) * (width - most)
        else:
            return 0.0
        return self._tokens(width) / max(seconds, 1e-9)

    def _tokens(self, width: int) -> float:
        """The expected number of tokens that one sequence gains in a step."""
        self._extend(width)
        return 1 + sum(mean.value for mean in self._first_right_shares[:width])

    def _extend(self, width: int) -> None:
        """Estimate guesses beyond those that the latest steps made, from the last of these."""
        first, held = self._tested, self._first_right_shares
        again = _PRIOR
        if first == 1:
            again = max(held[0].value, _PRIOR)
        elif first:
            again = min(held[first - 1].value / max(held[first - 2].value, 1e-9), 1.0)
        for at in range(first, width):
            before = held[at - 1].value if at else 1.0
            held[at] = _Mean(before * again, 1)

    def _gain(self, known: Mapping[int, _Mean], width: int) -> float:
        if 0 not in known or not known[0].value:
            return 1.0
        return self._rate(known, width) * known[0].value if width else 1.0

    def _known(self, rows: int, longest: int) -> dict[int, _Mean]:
        """Times for this number of sequences and length.

        Initially those of the most similar known step.
        """
        key = _size(rows), _size(longest)
        if key not in self._seconds:
            near = min(
                self._seconds,
                key=lambda other: (abs(other[0] - key[0]), abs(other[1] - key[1]), other),
                default=None,
            )
            start = self._seconds[near] if near is not None else {}
            self._seconds[key] = {width: _Mean(mean.value, 1) for width, mean in start.items()}
        return self._seconds[key]


def _size(number: int) -> int:
    """A class of numbers within a factor of two."""
    return max(number - 1, 0).bit_length()
