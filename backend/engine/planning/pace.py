"""Decides how many tokens each prefill step has, so that streams never wait for a whole prompt.

A prefill step runs between two decode steps and delays every running stream by its duration. The
pace measures how long passes take, and limits each step to the tokens that fit in the allowed
pause. While no stream is running the pause may be longer, but it still limits how long a cancel or
a new request waits.

A part of the time of a pass does not depend on the number of its tokens, because every pass reads
all weights and starts all kernels. The rest grows with the number of tokens and, because of
attention, with the number of tokens before them:

    seconds = fixed + each * tokens + context * tokens * (tokens before)

The three numbers are fitted to the latest passes: first the fixed part and the time per token to
passes with little context, and then, given the fixed part, the effect of the context to all passes.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

from backend.engine.planning.plan import StepPlan

SMALLEST_STEP = 8
_FIRST = 64  # tokens of a step before any pass has been timed
_WIDTH = 32.0  # `Pace.width` that is assumed until passes of different lengths have been timed
_IDLE_PAUSE = 4.0  # factor of the allowed pause while no stream is running
_MEMORY = 0.7  # weight of earlier passes in the current speed
_SHAPE_MEMORY = 0.95  # likewise in the fit, which needs passes of very different lengths
_LEAST_SPEED = 50.0  # tokens per second that ageing assumes until a pass has been timed
_NEAR = 1024.0  # tokens; a shorter context has little effect, and a smaller difference is noise
_LEAST_SHARE = 16  # the fit assumes that at least 1/16 of a pass's time grows with its tokens
_DOUBT = 0.01  # weight of the assumed width, as a share of the weight of the timed passes
_CREDIBLE = 4.0  # a pass counts as at most this many times as fast as predicted
# A pass has at most this many times the tokens of the longest timed pass. Short passes predict
# little about long ones, because they take as long as the device needs to read the weights.
_GROWTH = 8


class _NormalEquations:
    """Sums of a weighted fit of two factors; plain numbers, because two are too few for NumPy."""

    def __init__(self) -> None:
        self.first = self.mixed = self.second = 0.0  # the symmetric matrix
        self.sums = (0.0, 0.0)

    def add(self, first: float, second: float, value: float) -> None:
        """Add a row with its value; earlier rows count less."""
        self.first = _SHAPE_MEMORY * self.first + first * first
        self.mixed = _SHAPE_MEMORY * self.mixed + first * second
        self.second = _SHAPE_MEMORY * self.second + second * second
        left, right = self.sums
        self.sums = (
            _SHAPE_MEMORY * left + first * value,
            _SHAPE_MEMORY * right + second * value,
        )


class Pace:
    """Predicts how long prefill passes take, and how many tokens the next prefill step may have.

    Passes may be slow for reasons that do not repeat, such as the compilation of kernels, so a
    single slow pass changes little. No pass is faster than the device allows, so fast passes count
    more.

    most_tokens: maximum number of tokens of a step.
    stall_ms: maximum time of a step, in ms, while streams wait for it.
    known: whether a pass has been timed. Before that, _FIRST tokens are assumed to need that time.
    """

    def __init__(self, most_tokens: int, stall_ms: float) -> None:
        self._most = max(most_tokens, SMALLEST_STEP)
        self._stall = stall_ms / 1e3
        # Of [1, tokens] over passes with little context, and of [tokens, tokens * behind] over all.
        # Rows are divided by the pass's seconds, so that errors are relative.
        self._near, self._all = _NormalEquations(), _NormalEquations()
        # Passes up to this context, in tokens, count as passes with little context.
        self._nearest = float("inf")
        self.known = False
        self._longest = _FIRST // _GROWTH  # tokens of the longest timed pass
        self._each = self._stall / (_FIRST + _WIDTH)
        self._fixed, self._context = self._each * _WIDTH, 0.0
        self._tokens = self._seconds = 0.0  # sums over the latest passes
        self._moment = 1.0  # ratio of the times of the latest passes to the fit's predictions
        self._latest: deque[float] = deque(maxlen=3)  # the same ratio of single passes

    @property
    def fixed_seconds(self) -> float:
        """The part of a pass's time that does not depend on its number of tokens, in seconds."""
        return self._moment * self._fixed

    @property
    def width(self) -> int:
        """The number of tokens whose own time equals `fixed_seconds`.

        A pass of fewer tokens is mostly overhead.
        """
        return round(min(max(self._fixed / self._each, 1.0), self._most))

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of the latest passes; None before the first timed pass."""
        return self._tokens / self._seconds if self.known else None

    def seconds(self, tokens: int, behind: int = 0) -> float:
        """Return the predicted seconds of a pass.

        tokens: number of tokens, including padding.
        behind: number of the prompt's tokens that are already computed.
        """
        return self._moment * (self._fixed + tokens * (self._each + behind * self._context))

    def step_seconds(self, plan: StepPlan) -> float:
        """Return the predicted seconds of a step, as if its batches had little context."""
        seconds = 0.0
        for group in plan.prefill:
            widest = max(part.end - part.start for part in group)
            seconds += self.seconds(len(group) * widest, max(part.start for part in group))
        for batch, rows in plan.decode.items():
            seconds += self.seconds(rows * (1 + plan.draft.get(batch, 0)))
        return seconds + sum(self.seconds(score.budget) for score in plan.score)

    def pause(self, *, running: bool) -> float:
        """Return the maximum seconds of a step, which are fewer while streams are running."""
        return self._stall if running or not self.known else self._stall * _IDLE_PAUSE

    def tokens(self, *, running: bool, behind: int = 0) -> int:
        """Return the number of tokens of the next step, from SMALLEST_STEP to the maximum.

        behind: number of the prompt's tokens that are already computed.
        """
        return self.fitting(self.pause(running=running), behind)

    def fitting(self, seconds: float, behind: int = 0) -> int:
        """Return how many tokens a pass of this duration has, within the limits of `tokens`."""
        token = self._moment * (self._each + behind * self._context)
        # At most the time of the maximum number of tokens; otherwise the division could overflow.
        left = min(max(seconds - self.fixed_seconds, 0.0), self._most * token)
        fitting = int(left / token) // SMALLEST_STEP * SMALLEST_STEP
        return min(max(fitting, SMALLEST_STEP), self._most, _GROWTH * self._longest)

    def urgency(self, left: int, waited: float) -> float:
        """Return a number by which prompts are ordered; the prompt with the smallest goes first.

        It is the number of tokens left to prefill, less half of the tokens that passes could have
        computed while the prompt waited. So short prompts go first, and a long prompt advances as
        it waits. After a prompt has waited for twice the time that it needs, no newer prompt
        overtakes it.

        waited: seconds since the prompt arrived.
        """
        rate = max(self.tokens_per_second or _LEAST_SPEED, _LEAST_SPEED) / 2
        return max(left, 0) - rate * waited

    def measured(self, tokens: int, seconds: float, behind: int = 0) -> None:
        """Record a timed pass, with the arguments of `seconds`; one without tokens is ignored."""
        if tokens < 1:
            return
        seconds = max(seconds, 1e-9)
        self._nearest = min(self._nearest, max(behind, _NEAR))
        self._longest = max(self._longest, tokens)
        first = not self.known
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds
        expected = seconds if first else self.seconds(tokens, behind)
        scale = max(seconds, expected / _CREDIBLE)
        if behind <= self._nearest:
            self._near.add(1 / scale, tokens / scale, seconds / scale)
            self._fixed = self._fit_fixed()
        growing = max(seconds - self._fixed, seconds / _LEAST_SHARE)
        self._all.add(tokens / scale, tokens * behind / scale, growing / scale)
        self._fit_context()
        self.known = True
        # The fit adapts slowly to a change of the machine's speed; `_moment` adapts immediately.
        moment, self._moment = self._moment, 1.0
        self._latest.append(seconds / self.seconds(tokens, behind))
        memory = 0.0 if first else _MEMORY
        self._moment = memory * moment + (1 - memory) * median_low(self._latest)

    def _fit_fixed(self) -> float:
        """Return the fixed seconds of a pass, at least 0, by weighted least squares.

        If all passes have about the same length, the fixed part is assumed to equal the time of
        _WIDTH tokens.
        """
        near = self._near
        doubt = _DOUBT * near.first
        first, mixed = near.first + doubt, near.mixed - doubt * _WIDTH
        second = near.second + doubt * _WIDTH**2
        left, right = near.sums
        determinant = first * second - mixed**2  # at least _DOUBT of the product
        if first * right <= mixed * left:  # more tokens would take no longer
            return left / near.first
        return max((second * left - mixed * right) / determinant, 0.0)

    def _fit_context(self) -> None:
        """Fit the seconds per token and the effect of the context, given the fixed seconds.

        The effect is measured from the mean context, because passes with a long context predict
        little about passes without. The fit is biased towards no effect, because the differences
        between similar contexts are mostly noise.
        """
        weight, (first, second) = self._all.first, self._all.sums
        mean = self._all.mixed / weight
        each = first / weight
        spread = self._all.second - mean * self._all.mixed + weight * _NEAR**2
        slope = max((second - mean * first) / spread, 0.0)
        self._each = max(each - mean * slope, each / _LEAST_SHARE)
        self._context = (each - self._each) / mean if mean else 0.0
