"""Decides how prompts are cut into prefill steps, so that nobody waits for a whole prompt.

A prefill step runs between two decode steps and delays every running stream by its own length.
The pace keeps a measured time per token and gives each step as many tokens as fit in the pause
that is allowed; while nothing is running, the pause may be longer, but a cancel or a newcomer
still waits for no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    def measured(self, tokens: int, seconds: float) -> None:
        """Learn from a step. Steps of a few tokens cost mostly overhead and teach nothing."""
        if tokens < SMALLEST_STEP:
            return
        latest = seconds / tokens
        if self._seconds_per_token is None:
            self._seconds_per_token = latest
        else:
            self._seconds_per_token = _MEMORY * self._seconds_per_token + (1 - _MEMORY) * latest


def chunk_end(filled: int, prompt_length: int, budget: int, checkpoints: Sequence[int]) -> int:
    """Where the next chunk of a prompt ends.

    The last token is never prefilled: the first decode step feeds it. A chunk stops at a
    checkpoint, because the state of a recurrent layer can be copied only where it is.
    """
    end = min(filled + budget, prompt_length - 1)
    return min([end, *(place for place in checkpoints if place > filled)])
