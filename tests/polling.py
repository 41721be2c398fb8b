"""Waits for conditions that no event announces, by polling.

There is a short pause between two checks: without one, a polled process would use a core, and the
condition would take longer to become true.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PAUSE = 0.01  # seconds
_WAIT = 240.0


def until(holds: Callable[[], object]) -> None:
    """Return when the condition is true. Raises AssertionError after four minutes."""
    end = time.monotonic() + _WAIT
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(PAUSE)
