"""How much memory this process has had at a time at most, for children that end at a limit.

Linux counts what the process that started this one had into `ru_maxrss`: a child of a backend with
gigabytes of weights would never reach its limit by that. VmHWM (proc_pid_status(5)) begins anew.
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
    """Bytes of resident memory."""
    try:
        found = _PEAK.search(_STATUS.read_bytes())
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
