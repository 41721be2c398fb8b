"""Threads that finish their turn before others of the process that wake up, on Linux.

On a CPU, MLX hands each operation to a thread of its own. Small models take microseconds for one,
and a third of the time of a test would go into switching to that thread and back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def taking_turns() -> Iterator[None]:
    """Until the end for all threads of this process, and for processes that it starts meanwhile."""
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    _set_policy(os.SCHED_BATCH)
    try:
        yield
    finally:
        _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))
