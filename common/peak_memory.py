"""Measures the peak memory of this process, for child processes that limit their own memory.

On Linux, `ru_maxrss` of a child process starts at the value of its parent, which may have gigabytes
of weights. So VmHWM (proc_pid_status(5)) is read instead, which starts at zero.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB$", re.M)
_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_memory() -> int:
    """Return the peak resident memory in bytes."""
    try:
        found = _PEAK.search(_STATUS.read_bytes())
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
