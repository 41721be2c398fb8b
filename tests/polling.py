"""Waits for what nothing announces, by asking again and again.

Between two questions is a short pause, because a process that is asked without one uses a core, and
what is waited for takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PAUSE = 0.01  # seconds
_WAIT = 240.0


def until(holds: Callable[[], object]) -> None:
    """Return once it holds. Raises AssertionError after four minutes."""
    end = time.monotonic() + _WAIT
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(PAUSE)
