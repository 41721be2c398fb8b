"""Decides how prompts are cut into prefill steps, so that nobody waits for a whole prompt.

A prefill step runs between two decode steps and delays every running stream by its own length.
The pace keeps a measured time per token and gives each step as many tokens as fit in the pause
that is allowed; while nothing is running, the pause may be longer, but a cancel or a newcomer
still waits for no more than that.
"""

from __future__ import annotations

SMALLEST_STEP = 32
_IDLE_PAUSE = 4.0  # times the allowed pause, while no stream is running
_MEMORY = 0.7  # weight of earlier measurements


class Pace:
    """How many prompt tokens the next prefill step may take."""

    def __init__(self, most_tokens: int, stall_ms: float) -> None:
        self._most = max(most_tokens, SMALLEST_STEP)
        self._stall = stall_ms / 1e3
        self._seconds_per_token: float | None = None

    def tokens(self, *, running: bool) -> int:
        """Budget of the next step, from SMALLEST_STEP up to the configured most."""
        if self._seconds_per_token is None:
            return min(2 * SMALLEST_STEP, self._most)
        pause = self._stall if running else self._stall * _IDLE_PAUSE
        fitting = int(pause / self._seconds_per_token) // SMALLEST_STEP * SMALLEST_STEP
        return min(max(fitting, SMALLEST_STEP), self._most)

    @property
    def tokens_per_second(self) -> float | None:
        """The measured speed; None until a step was measured."""
        return 1 / self._seconds_per_token if self._seconds_per_token else None

    def measured(self, tokens: int, seconds: float) -> None:
        """Learn from a step. Steps of a few tokens cost mostly overhead and teach nothing."""
        if tokens < SMALLEST_STEP:
            return
        latest = seconds / tokens
        if self._seconds_per_token is None:
            self._seconds_per_token = latest
        else:
            self._seconds_per_token = _MEMORY * self._seconds_per_token + (1 - _MEMORY) * latest
