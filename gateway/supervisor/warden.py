"""Ends the backends of a gateway that could not do it itself, because it was killed.

A small process holds the reading end of a pipe. The gateway tells it of every process group that
it starts and of every one that is gone; when the pipe ends, so has the gateway, and what is still
on the list is ended: backends of others need not watch their parent as ours do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import IO

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_STEP = 0.05


class Warden:
    """The gateway's side. The process is started with the first group."""

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self._child: subprocess.Popen[bytes] | None = None

    def watch(self, group: int) -> None:
        """Take a process group on the list."""
        self.groups.add(group)
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Take a group off it that is gone."""
        self.groups.discard(group)
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Kill what is still on the list, and end the process."""
        for group in self.groups:
            signal_group(group, signal.SIGKILL)
        if self._child is not None:
            with contextlib.suppress(OSError):
                _pipe(self._child).close()
            self._child.wait()
            self._child = None

    def _tell(self, line: str) -> None:
        if self._child is not None and self._child.poll() is None:
            try:
                _pipe(self._child).write(line.encode())
            except BrokenPipeError:
                pass
            else:
                return
        if not self.groups:
            return
        # A session of its own and no environment: no signal of a terminal reaches it.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={},
            cwd="/",
            start_new_session=True,
        )
        _pipe(self._child).write("".join(f"+{group}\n" for group in self.groups).encode())


def _pipe(child: subprocess.Popen[bytes]) -> IO[bytes]:
    assert child.stdin is not None
    return child.stdin


def signal_group(group: int, number: signal.Signals) -> bool:
    """Signal a process group; False if it is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS refuses for a group of zombies
        return False
    return True


def _main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    left = {group for group in groups if signal_group(group, signal.SIGTERM)}
    until = time.monotonic() + _GRACE
    while left and time.monotonic() < until:
        time.sleep(_STEP)
        left = {group for group in left if signal_group(group, signal.Signals(0))}
    for group in left:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    _main()
