"""Whether a thread that wakes up may take the processor from another one.

MLX's thread is woken for each operation. In most tests it may not preempt the thread that woke it:
it would do so hundreds of times per step, which takes a quarter of the tests' processor time.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def allow(allowed: bool) -> None:
    """Set it for this thread, and for the threads and processes that it starts from now on."""
    if sys.platform == "linux":
        policy = os.SCHED_OTHER if allowed else os.SCHED_BATCH
        with suppress(OSError):  # some containers do not permit it
            os.sched_setscheduler(0, policy, os.sched_param(0))
