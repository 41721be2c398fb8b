"""`python -m backend.rpc.monitor FILE PID`: kills a backend that can no longer end itself.

A native call that hangs while it holds the interpreter's lock stops every thread of the backend,
including its event loop, so only another process can notice. This one shares the backend's
heartbeat through the open file descriptor FILE. Its standard input is a pipe from the backend; it
ends when that is closed. A timer inside the backend, such as faulthandler's, is no substitute: it
also counts time during which the process is stopped, and would fire as soon as it resumes.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from backend.engine.heartbeat import BYTES, TICK_SECONDS, Heartbeat, Standstill
from common.log_lines import stamp

GRACE = 5  # extra seconds that the backend gets to end by itself
_DOUBTFUL = 2  # seconds of silence after which to check whether a signal has stopped the process


def main(file: int, process: int) -> None:
    heartbeat = Heartbeat(mmap.mmap(file, BYTES))
    engine, loop = Standstill(), Standstill()
    while not select.select([0], [], [], TICK_SECONDS)[0]:
        limit, due = heartbeat.limit, heartbeat.guarded
        now = time.monotonic()
        stuck = engine.check(heartbeat.steps, now, due=due and heartbeat.running)
        silent = loop.check(heartbeat.ticks, now, due=due)
        if silent >= _DOUBTFUL and is_stopped(process):
            engine, loop = Standstill(), Standstill()
        elif due and silent >= limit + GRACE:
            if os.getppid() == process:  # otherwise the pid may belong to another process by now
                cause = heartbeat.hang_message if stuck >= limit else "the event loop hangs"
                cause += f"; the process has not answered for {silent:.0f} s"
                os.kill(process, signal.SIGKILL)
                if select.select([], [2], [], 0)[1]:  # otherwise the pipe is full
                    os.write(2, f'{stamp()} level=error event=exit cause="{cause}"\n'.encode())
            return


def is_stopped(process: int) -> bool:
    """Return whether a signal or a debugger has stopped the process, so that it cannot progress."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
    except OSError:
        command = ["/bin/ps", "-o", "state=", "-p", str(process)]
        state = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return state.strip()[:1] in ("T", "t")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
