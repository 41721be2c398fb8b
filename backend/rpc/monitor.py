"""`python -m backend.rpc.monitor FILE PID`: ends a backend that can no longer end itself.

A native call that hangs and keeps the interpreter's lock stops every thread of the backend, its
event loop too, so it takes another process to see that. This one shares the backend's heartbeat
through the open file FILE, and ends when its standard input does: the backend holds the other end.
A timer within the backend, such as faulthandler's, will not do: it counts the time in which the
process was stopped, and would fire at the first moment after.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from backend.engine.heartbeat import BYTES, TICK_SECONDS, Heartbeat, Standstill

GRACE = 5  # ticks that the backend has beyond its limit, to end by itself
_DOUBTFUL = 2  # ticks of silence from which it may be that the process is stopped


def main(file: int, process: int) -> None:
    """Watch until the process is gone, or hangs."""
    heartbeat = Heartbeat(mmap.mmap(file, BYTES))
    engine, loop = Standstill(), Standstill()
    while not select.select([0], [], [], TICK_SECONDS)[0]:
        due = heartbeat.guarded
        stuck = engine.look(heartbeat.steps, due=due and heartbeat.running)
        silent = loop.look(heartbeat.ticks, due=due)
        if silent >= _DOUBTFUL and _stopped(process):
            engine, loop = Standstill(), Standstill()
        elif due and silent >= heartbeat.limit + GRACE:
            if os.getppid() == process:  # else the number may be another's by now
                cause = heartbeat.complaint if stuck >= heartbeat.limit else "the event loop hangs"
                cause += f"; the process has not answered for {silent} s"
                os.kill(process, signal.SIGKILL)
                if select.select([], [2], [], 0)[1]:  # else nobody reads it
                    os.write(2, f'level=error event=exit cause="{cause}"\n'.encode())
            return


def _stopped(process: int) -> bool:
    """Whether the process is stopped, by a signal or by a debugger: then it need not progress."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
    except OSError:
        command = ["/bin/ps", "-o", "state=", "-p", str(process)]
        state = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return state.strip()[:1] in ("T", "t")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
