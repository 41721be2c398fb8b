"""Ends a backend that its gateway has left behind: `python -I -S warden_process.py`.

Backends of other programs do not watch their parent. Standard input is a pipe, into which the
gateway writes the id of the backend's process group. It kills this process once the backend has
ended. If the pipe is closed before that, the gateway has ended: the group gets SIGTERM, and SIGKILL
later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def signal_group(group: int, number: int) -> None:
    """Signal a process group, if it still exists."""
    # macOS refuses if the group has only zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main() -> None:
    # A signal to all processes of a service is for the gateway, which drains.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if line := sys.stdin.readline():
        sys.stdin.read()
        signal_group(int(line), signal.SIGTERM)
        time.sleep(_GRACE)
        signal_group(int(line), signal.SIGKILL)


if __name__ == "__main__":
    main()
