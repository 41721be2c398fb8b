"""Decides how many draft tokens a decode step may check, from measured costs and gains.

The width of a step is the maximum number of draft tokens per sequence. The time that draft tokens
add to a step depends on the machine, the model, and the number and length of the sequences; the
number of tokens gained depends on the text. Both are measured, and the width with the most tokens
per second is used. A step of width 0, without draft tokens, is called plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backend.engine.engine_state import DraftReport
from backend.engine.planning.plan import Drafted

WIDTHS = (0, 1, 2, 4, 8, 16, 32, 64)
MOST_AGAIN = 8  # tokens that a step with draft tokens feeds to a sequence for the second time
NEAR = 32  # tokens; a sequence that misses more in the drafter's KV catches up alone
CATCH_UP = 256  # maximum number of tokens with which it catches up in one step
_GAIN = 1.03  # minimum ratio to the speed of plain steps at which drafting begins
_TRIAL = 4  # plain steps of a trial that measures their time; the first of them is not counted
_FIRST_TRIAL = 3  # steps of a trial that measures the time of a width for the first time
_RETEST = 2  # steps of a test whether draft tokens are accepted again
_FIRST_REFRESH = 32  # drafting steps after which plain steps are timed again; doubles each time
_LONGEST_REFRESH = 256
_LEAST_PLAIN = 32  # minimum number of plain steps between two tests
_UNREPORTED = 7  # plain steps between two reported steps, while drafting is paused
# Tests may take this share of the time of plain steps. Each test that fails halves the share.
_RETEST_SHARE = 0.01
_LEAST_RETEST_SHARE = 0.0025
_MOST_SPENT = 200.0  # plain steps; limits the effect of a process that was stopped during a test
_PRIOR = 0.6  # assumed probability that the draft token after an accepted one is accepted too
_MEMORY = 24  # measurements over which times are averaged
# Steps over which acceptance is averaged, divided by the number of sequences, but at least
# _LEAST_TEXT. A longer average would follow changes of the text too slowly.
_TEXT = 32
_LEAST_TEXT = 12
# Steps in which all drafters catch up with their prompts, before a draft token is accepted. Each
# plain step adds _PATIENCE_BACK of such a step again.
_PATIENCE = 64.0
_PATIENCE_BACK = 1 / 64
_OUTLIER = 3.0  # a time counts as at most this multiple of the average


@dataclass(slots=True)
class _Mean:
    """An average of the latest measurements."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float, memory: int) -> None:
        self.count = min(self.count + 1, memory)
        self.value += (value - self.value) / self.count


class DraftWidth:
    """Chooses the width of each step, up to `most`, for one loaded model.

    report: the current width, and counts of draft tokens, for Status.
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
        # plain steps since the last drafting step, and drafting steps since the last plain trial
        self._plain = self._drafting = 0
        # The time that draft tokens have wasted since they last saved time, as a number of plain
        # steps: the time of the steps with draft tokens, less the time of plain steps for as many
        # tokens. Each plain step reduces this number by `_retest_share`.
        self._spent = 0.0
        self._retest_share = _RETEST_SHARE
        self._latest = 0  # width of the latest step
        # the times in `_seconds` that were the reason for the latest pause of drafting
        self._resting: Mapping[int, _Mean] | None = None
        self._rested = (0, 0)  # number of sequences, and of the unreported steps that are left
        self._refresh = _FIRST_REFRESH
        self.report = DraftReport()

    def skip(self, rows: int, most: int = 1) -> int:
        """Return how many of the next steps of `rows` sequences are plain and not reported.

        These steps count as done. If there are none, `choose` returns the width of the next step.
        Most steps are not reported while drafting is paused, because for a small model that would
        cost more than the tests of draft tokens.

        most: upper bound of the result.
        """
        before, left = self._rested
        steps = min(left, most) if rows == before else 0
        self._rested = (rows, left - steps) if rows == before else (0, 0)
        self._plain += steps
        for _ in range(steps):
            self._make_up()
        return steps

    def choose(self, rows: int, longest: int, most: int) -> int:
        """Return the width of the next step of `rows` sequences; 0 for a plain step.

        longest: number of tokens of the longest sequence.
        most: maximum width for which there is memory.
        """
        known = self._known(rows, longest)
        fits = min(self._decide(known, rows), most)
        width = max(each for each in self._widths if each <= fits)
        if width:
            self._plain, self._drafting = 0, self._drafting + 1
        else:
            self._plain += 1
        was, gain = self.report, self._gain(known, width)
        if (width, gain) != (was.width, was.gain):
            self.report = DraftReport(width, was.proposed, was.accepted, gain)
        return width

    def learn(self, step: Drafted) -> None:
        """Record a finished step. Sequences whose drafter is behind do not count as rejections."""
        rows, width, right, seconds = step.rows, step.width, step.right, step.seconds
        known = self._known(rows, step.longest)
        changed, self._latest = width != self._latest, width
        self._spend(known, width, sum(right) / max(rows, 1), seconds, changed=changed)
        if step.behind >= rows and self._patience >= 1:
            self._patience -= 1
            self._trial = width, max(self._trial[1], 1)
            return
        if changed:
            # The first step of a width is not typical: drafters catch up, or nothing overlaps.
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
        judged = max(rows - step.behind, 1)
        for at in range(width):
            share = sum(count > at for count in right) / judged
            self._first_right_shares[at].add(share, max(_TEXT // max(rows, 1), _LEAST_TEXT))
        self._estimate()
        if not self._can_pay(known, width):
            if seconds:
                self._trial = width, 0
        elif sum(right) >= step.proposed > 0:
            # a test continues as long as all draft tokens are accepted
            self._trial = width, max(self._trial[1], 1)
        was = self.report
        self.report = DraftReport(
            was.width, was.proposed + step.proposed, was.accepted + sum(right), was.gain
        )

    def _decide(self, known: Mapping[int, _Mean], rows: int) -> int:
        width, left = self._trial
        if left:
            self._trial = width, left - 1
            return width
        if known.get(0, _Mean()).count < _TRIAL - 1:
            return self._try(0)
        if self._drafting >= self._refresh:
            self._drafting = 0
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
        """Pause drafting; `known` has the times that are the reason."""
        if self._resting is not known:
            self._drafting = 0
        self._resting = known

    def _try(self, width: int, steps: int = _TRIAL) -> int:
        self._trial = width, steps - 1
        return width

    def _rate(self, known: Mapping[int, _Mean], width: int) -> float:
        """Return the expected tokens per second of each sequence, at a width.

        The time of the smallest width that was not measured is estimated. Larger widths return 0.
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
        """Estimate how many tokens a step of each width gains, beyond measured widths too."""
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
        """Return whether drafting would save time if all draft tokens were accepted."""
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
        """Add to `_spent` by how much a step took longer than plain steps for as many tokens.

        The first step of a test, in which drafters catch up, and the plain step after a test count
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
        """Count a plain step, which reduces `_spent`."""
        self._spent = max(self._spent - self._retest_share, 0.0)
        self._patience = min(self._patience + _PATIENCE_BACK, _PATIENCE)

    def _known(self, rows: int, longest: int) -> dict[int, _Mean]:
        """Return the times, by width, of similar steps; at first, those of the most similar."""
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
    """Return the rounded-up base-2 logarithm of a number."""
    return max(number - 1, 0).bit_length()
