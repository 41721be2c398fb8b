"""Decides how prompts are cut into prefill steps, so that nobody waits for a whole prompt.

A prefill step runs between two decode steps and delays every running stream by its own length.
The pace keeps a measured time per token and gives each step as many tokens as fit in the pause
that is allowed; while nothing is running, the pause may be longer, but a cancel or a newcomer
still waits for no more than that.

Attention looks at all that came before, so a token takes the longer the more is behind it. That is
a straight line, fitted to the latest passes.
"""

from __future__ import annotations

SMALLEST_STEP = 8
PASS_TOKENS = 32  # a pass of fewer takes about as long: the weights are read all the same
_IDLE_PAUSE = 4.0  # times the allowed pause, while no stream is running
_MEMORY = 0.7  # weight of earlier passes in the speed of the moment
_SHAPE_MEMORY = 0.95  # and in the line, which only passes far apart can show
_NEAR = 1024.0  # tokens; what passes no further apart than this show of the line is mostly noise


class Pace:
    """How many prompt tokens the next prefill step may take."""

    def __init__(self, most_tokens: int, stall_ms: float) -> None:
        self._most = max(most_tokens, SMALLEST_STEP)
        self._stall = stall_ms / 1e3
        self._latest: float | None = None  # seconds per token, wherever it was
        self._moment = 1.0  # what the latest passes took, in times of what the line says
        self._weight = self._behind = self._time = self._spread = self._common = 0.0

    def tokens(self, *, running: bool, behind: int = 0) -> int:
        """Budget of the next step, from SMALLEST_STEP up to the configured most.

        behind: tokens of the prompt that are computed already.
        """
        if self._latest is None:
            return min(2 * PASS_TOKENS, self._most)
        pause = self._stall if running else self._stall * _IDLE_PAUSE
        seconds = self._moment * self._line(behind)
        fitting = int(pause / seconds) // SMALLEST_STEP * SMALLEST_STEP
        return min(max(fitting, SMALLEST_STEP), self._most)

    @property
    def tokens_per_second(self) -> float | None:
        """The measured speed; None until a step was measured."""
        return 1 / self._latest if self._latest else None

    def measured(self, tokens: int, seconds: float, behind: int = 0) -> None:
        """Learn from a step. A short prompt's few tokens say nothing of what longer steps take."""
        if tokens < min(PASS_TOKENS, self.tokens(running=True, behind=behind)):
            return
        each = max(seconds / tokens, 1e-9)
        first = self._latest is None
        memory = 0.0 if first else _MEMORY
        self._latest = memory * (self._latest or 0.0) + (1 - memory) * each
        self._learn(each, behind)
        off = each / self._line(behind)
        self._moment = memory * self._moment + (1 - memory) * off

    def _line(self, behind: int) -> float:
        """Seconds per token with so many behind it."""
        slope = max(self._common / (self._spread + self._weight * _NEAR**2), 0.0)
        # Passes with much behind them say little of those with nothing, but never too much.
        return max(self._time + slope * (behind - self._behind), self._time / 16)

    def _learn(self, each: float, behind: int) -> None:
        """Weighted least squares with means kept up to date (https://doi.org/10.1145/359146.359153).

        Weights are those of relative errors: a pass that takes long is off by more.
        """
        own = each**-2
        self._weight = _SHAPE_MEMORY * self._weight + own
        further, slower = behind - self._behind, each - self._time
        self._behind += further * own / self._weight
        self._time += slower * own / self._weight
        self._spread = _SHAPE_MEMORY * self._spread + own * further * (behind - self._behind)
        self._common = _SHAPE_MEMORY * self._common + own * further * (each - self._time)
