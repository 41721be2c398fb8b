"""Decides how many tokens each prefill step has, so that streams never wait for a whole prompt.

A prefill step runs between two decode steps and delays every running stream by its own duration.
The pace measures the time per token and gives each step as many tokens as fit in the allowed pause.
While no stream is running the pause may be longer, but it still limits how long a cancel or a new
request waits.

Because of attention, the time per token grows linearly with the number of tokens before it. The
line is fitted to the latest passes.
"""

from __future__ import annotations

SMALLEST_STEP = 8
PASS_TOKENS = 32  # a shorter pass takes about as long, because it reads all weights too
_IDLE_PAUSE = 4.0  # factor of the allowed pause while no stream is running
_MEMORY = 0.7  # weight of earlier passes in the current speed
_SHAPE_MEMORY = 0.95  # weight of earlier passes in the line, which needs very different lengths
_LEAST_SPEED = 50.0  # tokens per second that ageing assumes until a pass has been timed
_NEAR = 1024.0  # tokens; passes at lengths closer than this show mostly noise


class Pace:
    """How many prompt tokens the next prefill step may take."""

    def __init__(self, most_tokens: int, stall_ms: float) -> None:
        self._most = max(most_tokens, SMALLEST_STEP)
        self._stall = stall_ms / 1e3
        self._latest: float | None = None  # seconds per token of the latest pass
        self._moment = 1.0  # ratio of the times of the latest passes to the line's predictions
        self._weight = self._behind = self._time = self._spread = self._common = 0.0

    def tokens(self, *, running: bool, behind: int = 0) -> int:
        """The number of tokens of the next step, from SMALLEST_STEP to the configured maximum.

        running: whether streams wait for the step. behind: tokens of the prompt that are already
        computed.
        """
        if self._latest is None:
            return min(2 * PASS_TOKENS, self._most)
        pause = self._stall if running else self._stall * _IDLE_PAUSE
        seconds = self._moment * self._line(behind)
        fitting = int(pause / seconds) // SMALLEST_STEP * SMALLEST_STEP
        return min(max(fitting, SMALLEST_STEP), self._most)

    @property
    def tokens_per_second(self) -> float | None:
        """The measured speed; None before the first measurement."""
        return 1 / self._latest if self._latest else None

    def urgency(self, left: int, waited: float) -> float:
        """Tokens left to prefill, minus the tokens that could have been prefilled while it waited.

        The smallest goes first: short prompts stay quick, and ageing keeps a long prompt from
        starving. Once a prompt has waited for twice the time that it needs, nothing newer overtakes
        it.
        """
        rate = max(self.tokens_per_second or _LEAST_SPEED, _LEAST_SPEED) / 2
        return max(left, 0) - rate * waited

    def measured(self, tokens: int, seconds: float, behind: int = 0) -> None:
        """Learn from a timed pass.

        Very short passes are ignored: they do not predict longer ones.
        """
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
        """Predicted seconds per token after `behind` tokens."""
        slope = max(self._common / (self._spread + self._weight * _NEAR**2), 0.0)
        # Passes after many tokens predict little about passes after none, so the prediction has a
        # minimum.
        return max(self._time + slope * (behind - self._behind), self._time / 16)

    def _learn(self, each: float, behind: int) -> None:
        """Incremental weighted least squares (https://doi.org/10.1145/359146.359153).

        The weights make errors relative, because long passes vary more.
        """
        own = each**-2
        self._weight = _SHAPE_MEMORY * self._weight + own
        further, slower = behind - self._behind, each - self._time
        self._behind += further * own / self._weight
        self._time += slower * own / self._weight
        self._spread = _SHAPE_MEMORY * self._spread + own * further * (behind - self._behind)
        self._common = _SHAPE_MEMORY * self._common + own * further * (each - self._time)
