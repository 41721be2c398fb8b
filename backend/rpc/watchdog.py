"""Ends a process whose engine hangs.

A task on the event loop measures how long the engine has been in the same step. If that is too
long, calls can still be answered, and the process exits in order. If the event loop hangs too, a
second process (`monitor`) kills it. That process starts with the first load, so that it does not
delay the first Health.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from backend.engine.heartbeat import BYTES, TICK_SECONDS, Heartbeat, Standstill
from backend.rpc import logs
from common.unnamed_file import unnamed_file

_ROOT = Path(__file__).parents[2]


class Watchdog:
    """The checks of a heartbeat, in this process and in a second one.

    hangs: called once, with the cause.

    Create it before the engine thread starts, because it moves the heartbeat into shared memory.
    """

    def __init__(self, heartbeat: Heartbeat, hangs: Callable[[str], None]) -> None:
        self._heartbeat = heartbeat
        self._hangs = hangs
        self._file = unnamed_file("heartbeat")
        os.ftruncate(self._file, BYTES)
        self._monitor: subprocess.Popen[bytes] | None = None
        heartbeat.move(mmap.mmap(self._file, BYTES))

    async def watch(self) -> None:
        """Check once per tick until the task is cancelled."""
        heartbeat, engine = self._heartbeat, Standstill()
        reported = False
        while True:
            await asyncio.sleep(TICK_SECONDS)
            heartbeat.tick()
            limit = heartbeat.limit  # before the count: it may be of an earlier step, not a later
            due = heartbeat.guarded and heartbeat.running
            seconds = engine.check(heartbeat.steps, time.monotonic(), due=due)
            if due and seconds >= limit and not reported:
                reported = True
                self._hangs(heartbeat.hang_message)

    def start_monitor(self) -> None:
        """Start the second process unless it is already running.

        It has its own process group, so that it does not get signals to the backend's.
        """
        if self._monitor is not None:
            return
        command = [sys.executable, "-S", "-m", "backend.rpc.monitor"]
        try:
            self._monitor = subprocess.Popen(
                [*command, str(self._file), str(os.getpid())],
                cwd="/",
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(self._file,),
                process_group=0,
            )
        except OSError as failure:
            logs.warning("monitor", started=False, why=failure)

    def close(self) -> None:
        if self._monitor is not None:
            assert self._monitor.stdin is not None
            self._monitor.stdin.close()
            self._monitor.wait()
