"""Decides how many draft tokens a decode step may check, from measured costs and gains.

Plain Python without MLX: times are arguments, so the same events always give the same widths. The
time that draft tokens add to a step depends on the machine, the model, and the number and length of
the sequences; the number of tokens gained depends on the text. Both are measured, and the width
with the most tokens per second is used. It may be 0: a step without draft tokens is called plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend.engine.engine_state import DraftReport

WIDTHS = (0, 1, 2, 4, 8, 16, 32, 64)
MOST_AGAIN = 8  # tokens that a step with draft tokens feeds to a sequence for the second time
_GAIN = 1.03  # minimum gain over plain steps that makes up for the uneven times of drafting
_TRIAL = 4  # plain steps that measure their time; the first of them is not counted
_FIRST_TRIAL = 3  # steps that measure the time of a width for the first time
_RETEST = 2  # steps of a test whether draft tokens are accepted again
_FIRST_REFRESH = 32  # drafting steps after which plain steps are timed again; doubles each time
_LONGEST_REFRESH = 256
_LEAST_PLAIN = 32  # minimum number of plain steps between two tests
_UNREPORTED = 7  # plain steps between two reported steps, while drafting is paused
# share of the time of plain steps that tests may take; each test that fails halves this share
_RETEST_SHARE = 0.01
_LEAST_RETEST_SHARE = 0.0025
_MOST_SPENT = 200.0  # plain steps; limits the effect of a process that was stopped during a test
_PRIOR = 0.6  # assumed probability that the draft token after an accepted one is accepted too
_MEMORY = 24  # measurements over which times are averaged
_TEXT = 32  # steps over which acceptance is averaged; limited because the text changes
_LEAST_TEXT = 12
_PATIENCE = 64.0  # steps that guessers may spend on catching up before a token is accepted
_PATIENCE_BACK = 1 / 64  # such steps that each plain step adds again
_OUTLIER = 3.0  # multiple of the average; longer times count as this


@dataclass(slots=True)
class _Mean:
    """An average of the latest measurements."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float, memory: int) -> None:
        self.count = min(self.count + 1, memory)
        self.value += (value - self.value) / self.count


class DraftWidth:
    """The measured costs and gains of draft tokens, for one loaded model.

    most: maximum number of draft tokens at a time.
    """

    def __init__(self, most: int) -> None:
        self._widths = [width for width in WIDTHS if width <= most]
        # Seconds of a step, by number and length of sequences, then by width.
        self._seconds: dict[tuple[int, int], dict[int, _Mean]] = {}
        # The share of a step's sequences whose first draft token was accepted, whose second, etc.
        self._first_right_shares = [_Mean() for _ in range(most)]
        self._tested = 0  # number of draft tokens for which the latest steps measured these shares
        self._expected = [1.0] * (most + 1)  # tokens that a sequence gains in a step, by width
        self._estimate()
        # the width being tried, and the remaining steps of the trial
        self._trial: tuple[int, int] = (0, 0)
        self._patience = _PATIENCE
        self._plain = self._guessing = 0  # steps of each kind since the last test of the other
        # The time that draft tokens have cost since they last saved time, as a number of plain
        # steps: the time of the steps, minus that of plain steps for as many tokens. Each plain
        # step reduces this number by `_retest_share`.
        self._spent = 0.0
        self._retest_share = _RETEST_SHARE
        self._latest = 0  # width of the latest step
        # the times in `_seconds` because of which drafting was last paused
        self._resting: Mapping[int, _Mean] | None = None
        self._rested = (0, 0)  # number of sequences, and the unreported steps that are left
        self._refresh = _FIRST_REFRESH
        self.report = DraftReport()

    def skips_drafting(self, rows: int) -> bool:
        """Return whether the next step of `rows` sequences is plain and need not be reported.

        Otherwise `choose` decides. While drafting is paused, calling `choose` and reporting every
        step would cost a small model more than the tests whether draft tokens are accepted again.
        """
        before, left = self._rested
        if rows != before or not left:
            self._rested = 0, 0
            return False
        self._rested = rows, left - 1
        self._plain += 1
        self._make_up()
        return True

    def skip_rest(self, rows: int) -> int:
        """Count the unreported steps of `rows` sequences that are left, and return their number."""
        before, left = self._rested
        if rows != before:
            return 0
        self._rested = rows, 0
        self._plain += left
        for _ in range(left):
            self._make_up()
        return left

    def choose(self, rows: int, longest: int, most: int) -> int:
        """Return the width of the next step of `rows` sequences; 0 for a plain one.

        longest: number of tokens of the longest sequence.
        most: how many draft tokens fit in memory.
        """
        known = self._known(rows, longest)
        fits = min(self._decide(known, rows), most)
        width = max(each for each in self._widths if each <= fits)
        if width:
            self._plain, self._guessing = 0, self._guessing + 1
        else:
            self._plain += 1
        was, gain = self.report, self._gain(known, width)
        if (width, gain) != (was.width, was.gain):
            self.report = DraftReport(width, was.proposed, was.accepted, gain)
        return width

    def learn(
        self,
        rows: int,
        longest: int,
        width: int,
        proposed: int,
        right: Sequence[int],
        seconds: float,
        behind: int = 0,
    ) -> None:
        """Record a finished step.

        rows, longest: as for `choose`.
        width: the result of `choose`.
        proposed: number of draft tokens of all sequences.
        right: for each sequence, the number of accepted draft tokens.
        seconds: time since the previous step if that had the same sequences; 0 if unknown.
        behind: number of sequences without draft tokens because their guesser has yet to catch up
            with a long prompt. They do not count as sequences whose draft tokens were rejected.
        """
        known = self._known(rows, longest)
        changed, self._latest = width != self._latest, width
        self._spend(known, width, sum(right) / max(rows, 1), seconds, changed=changed)
        if behind >= rows and self._patience >= 1:
            self._patience -= 1
            self._trial = width, max(self._trial[1], 1)
            return
        if changed:
            # The first step of a width is not typical: guessers catch up, or nothing overlaps.
            seconds = 0.0
        if seconds:
            mean = known.setdefault(width, _Mean())
            most = _OUTLIER * mean.value if mean.count else seconds
            mean.add(min(seconds, most), _MEMORY)
        if not width:
            return
        if any(right):
            self._patience = min(self._patience + 1, _PATIENCE)
        self._tested = width
        judged = max(rows - behind, 1)
        for at in range(width):
            share = sum(count > at for count in right) / judged
            self._first_right_shares[at].add(share, max(_TEXT // max(rows, 1), _LEAST_TEXT))
        self._estimate()
        if not self._can_pay(known, width):
            if seconds:
                self._trial = width, 0
        elif sum(right) >= proposed > 0:
            # a test continues as long as all draft tokens are accepted
            self._trial = width, max(self._trial[1], 1)
        was = self.report
        self.report = DraftReport(
            was.width, was.proposed + proposed, was.accepted + sum(right), was.gain
        )

    def _decide(self, known: Mapping[int, _Mean], rows: int) -> int:
        width, left = self._trial
        if left:
            self._trial = width, left - 1
            return width
        if known.get(0, _Mean()).count < _TRIAL - 1:
            return self._try(0)
        if self._guessing >= self._refresh:
            self._guessing = 0
            self._refresh = min(2 * self._refresh, _LONGEST_REFRESH)
            known[0].count = 1  # the machine's speed may have changed: forget most
            return self._try(0)
        # While drafting is paused, only plain steps are timed, so a change of the gain would be
        # noise, and is ignored.
        rests = self._resting is known or (self._resting is not None and self._spent > 0)
        rests = rests and self._plain > 0
        if rests and (self._plain < _LEAST_PLAIN or self._spent):
            self._give_up(known)
            self._rested = rows, _UNREPORTED
            return 0
        rates = {width: self._rate(known, width) for width in self._widths}
        best = max(self._widths, key=lambda width: (rates[width], -width))
        worth = self._gain(known, best) >= (_GAIN if self._plain else 1)
        if best and worth and not rests:
            self._resting = None
            self._retest_share = _RETEST_SHARE
            return best if best in known else self._try(best, _FIRST_TRIAL)
        self._give_up(known)
        best = max(self._widths[1:], key=lambda width: (rates[width], -width), default=0)
        if self._plain < _LEAST_PLAIN or self._spent:
            return 0
        self._plain = 0
        self._retest_share = max(self._retest_share / 2, _LEAST_RETEST_SHARE)
        for mean in self._first_right_shares:
            mean.count = min(mean.count, _RETEST)  # the text may have changed: forget most
        if not self._can_pay(known, best):
            known[best].count = 0  # measure the time again: the machine may have been busy
        return self._try(best, _RETEST)

    def _give_up(self, known: Mapping[int, _Mean]) -> None:
        """Pause drafting because of these times."""
        if self._resting is not known:
            self._guessing = 0
        self._resting = known

    def _try(self, width: int, steps: int = _TRIAL) -> int:
        self._trial = width, steps - 1
        return width

    def _rate(self, known: Mapping[int, _Mean], width: int) -> float:
        """Return the tokens per second of each sequence.

        The smallest width without a measurement is estimated; for larger widths the result is 0.
        """
        if width in known:
            seconds = known[width].value
        elif width == min((w for w in self._widths if w not in known), default=-1):
            # An additional draft token is assumed to cost as much as those before.
            most = max(each for each in self._widths if each in known)
            slope = (known[most].value - known[0].value) / most if most else 0.0
            seconds = known[most].value + max(slope, 0.0) * (width - most)
        else:
            return 0.0
        return self._expected[width] / max(seconds, 1e-9)

    def _estimate(self) -> None:
        """Estimate how many tokens each width gains.

        Widths above those of the latest steps are estimated from the widest of these.
        """
        first, shares = self._tested, self._first_right_shares
        again = _PRIOR
        if first == 1:
            again = max(shares[0].value, _PRIOR)
        elif first:
            again = min(shares[first - 1].value / max(shares[first - 2].value, 1e-9), 1.0)
        for at, mean in enumerate(shares):
            if at >= first:
                mean.value, mean.count = (shares[at - 1].value if at else 1.0) * again, 1
            self._expected[at + 1] = self._expected[at] + mean.value

    def _gain(self, known: Mapping[int, _Mean], width: int) -> float:
        if 0 not in known or not known[0].value:
            return 1.0
        return self._rate(known, width) * known[0].value if width else 1.0

    def _can_pay(self, known: Mapping[int, _Mean], width: int) -> bool:
        """Return whether steps whose draft tokens are all accepted would beat plain steps."""
        if width not in known or 0 not in known:
            return True
        return (1 + width) * known[0].value > known[width].value

    def _spend(
        self,
        known: Mapping[int, _Mean],
        width: int,
        gained: float,
        seconds: float,
        *,
        changed: bool,
    ) -> None:
        """Count the time of a step beyond that of plain steps for as many tokens.

        The first step of a test, in which guessers catch up, and the plain step after a test count
        too.
        gained: mean number of accepted draft tokens per sequence.
        """
        plain = known[0].value if 0 in known else 0.0
        if not plain:
            return
        if width:
            unknown = known[width].value if width in known else 2 * plain
            self._spent += (seconds or unknown) / plain - 1 - gained
        else:
            self._make_up()
            if changed and seconds:
                self._spent += max(seconds / plain - 1, 0.0)
        self._spent = min(max(self._spent, 0.0), _MOST_SPENT)

    def _make_up(self) -> None:
        """Count a plain step."""
        self._spent = max(self._spent - self._retest_share, 0.0)
        self._patience = min(self._patience + _PATIENCE_BACK, _PATIENCE)

    def _known(self, rows: int, longest: int) -> dict[int, _Mean]:
        """Return the times, by width, of steps with this number of sequences and this length.

        They begin with the times of the most similar known step.
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
    """Return a number that is the same for similar numbers: those within a factor of two."""
    return max(number - 1, 0).bit_length()
