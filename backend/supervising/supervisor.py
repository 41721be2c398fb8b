"""The small process that starts and ends the ranks of one machine.

It has one thread and imports neither gRPC nor MLX, so nothing can keep it from reacting to a signal
or to the end of a rank, not even MLX while it forms its group. It starts the ranks, kills those
that outlive rank 0, and starts them all again if one was lost, because MLX can form only one group
per process.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from backend.engine.ranks.hostfile import transport_environ
from backend.engine.ranks.place import TOKEN, Place
from backend.rpc import logs, parent_watch
from backend.rpc.monitor import is_stopped
from backend.supervising.command_line import Plan
from common.launch import command
from common.machine_memory import kills_for_memory
from common.process_end import end_of

LAST_LOAD = "MLX_BACKEND_LAST_LOAD"  # copied from backend.rpc.last_load, which imports gRPC
# Linux gives outgoing connections ports from 32,768 on, and macOS from 49,152 on.
_PORTS = range(1 << 14, 1 << 15)
_GRACE = 10.0  # seconds that rank 0 gets to shut down; it takes 7 at most
_REPORTS = 4.0  # seconds that rank 0 gets to report the loss of a rank
_FOLLOWERS_GRACE = 1.0  # seconds that the others get to notice that rank 0 has ended
_CHECK_SECONDS = 2.0  # seconds between two checks whether a signal has stopped a rank
# Seconds for which a signal may stop a rank. Ranks that are connected notice each other's silence
# earlier, unless `rank_timeout` is longer.
_MOST_STOPPED = 45.0
# seconds; ranks that live shorter than this several times in a row are not started again
_SHORT_LIFE = 20.0
_MOST_SHORT_LIVES = 3
_GIVEN_UP = 1
_MISUSED = 2
_SIGNALLED = 128  # exit code of a process that a signal ended: this plus the signal's number
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """Carries out one plan."""

    def __init__(self, plan: Plan, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._environ = dict(environ)
        self._asked: signal.Signals | None = None
        self._end = ""  # how a signal ended the ranks
        self._parent = os.getppid()
        self._watches = parent_watch.should_watch(environ, self._parent)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)

    def run(self) -> int:
        """Run until the ranks have ended.

        Returns the exit code of rank 0, or of the rank started here, as a shell does.
        """
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in (*_SIGNALS, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)
        with self._folder:
            code = self._lives()
        return code if code >= 0 else _SIGNALLED - code

    def _lives(self) -> int:
        short_lives = 0
        while True:
            began = time.monotonic()
            code = self._run_once(self._start())
            if self._asked is not None or code == _MISUSED:
                return code
            if not self._plan.restarts:
                if self._end:  # otherwise a rank has written the cause
                    logs.error("exit", cause=self._end)
                return code
            if code == 0 and not self._is_worker:  # somebody has asked rank 0 itself to stop
                return code
            short_lives = short_lives + 1 if time.monotonic() - began < _SHORT_LIFE else 0
            if short_lives >= _MOST_SHORT_LIVES and not self._is_worker:
                cause = "the ranks ended again and again soon after they started"
                logs.error("exit", cause=f"{cause}: {self._end}" if self._end else cause)
                return code or _GIVEN_UP
            logs.warning("ranks", restarted=True, after=self._end or f"exit code {code}")

    @property
    def _is_worker(self) -> bool:
        """Whether this machine has only a rank other than 0, which waits for rank 0 for ever."""
        return self._plan.place is not None and self._plan.place.rank > 0

    def _note(self, number: int, _: object) -> None:
        if number != signal.SIGCHLD and self._asked is None:
            self._asked = signal.Signals(number)

    def _start(self) -> list[subprocess.Popen[bytes]]:
        """Start the processes; the first one decides when the others end."""
        Path(self._folder.name).mkdir(mode=0o700, exist_ok=True)  # the system may have cleaned /tmp
        if (place := self._plan.place) is not None:
            return [self._spawn(place, self._plan.hostfile, self._environ)]
        count = self._plan.count
        ports = free_ports(count + 1)
        hostfile = Path(self._folder.name) / "hosts.json"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:count]]))
        environ = {**self._environ, TOKEN: self._environ.get(TOKEN) or secrets.token_hex(16)}
        names = ("127.0.0.1",) * count
        return [
            self._spawn(
                Place(rank, count, ("127.0.0.1", ports[count]), names), str(hostfile), environ
            )
            for rank in range(count)
        ]

    def _spawn(
        self, place: Place, hostfile: str, environ: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        own = {**environ, **transport_environ(place, hostfile, environ)}
        own.pop(parent_watch.SWITCH, None)  # the supervisor watches the host instead
        own[parent_watch.PARENT] = str(os.getpid())
        own[LAST_LOAD] = str(Path(self._folder.name) / "last_load")
        place.write(own)
        arguments = self._plan.rest if place.rank == 0 else ()
        return subprocess.Popen(
            command("-m", "backend", *arguments), env=own, stdin=subprocess.DEVNULL
        )

    def _run_once(self, processes: Sequence[subprocess.Popen[bytes]]) -> int:
        """Wait until a process ends, and end the others. Returns the exit code of the first one."""
        first, *others = processes
        stopped: dict[int, float] = {}
        silent: set[int] = set()
        kills = kills_for_memory()
        self._end = ""
        try:
            while first.poll() is None:
                if self._asked is not None:
                    return self._stop(first)
                if any(other.poll() is not None for other in others):
                    # Rank 0 notices too, and reports the loss before it ends, unless rank 0 itself
                    # was silent.
                    grace = 0.0 if is_stopped(first.pid) else _REPORTS
                    self._note_end(processes, silent, kills)
                    # Negative if rank 0 had to be killed, which is not why the ranks end.
                    return max(_ended(first, grace), 0) or _GIVEN_UP
                self._pause(_CHECK_SECONDS)
                if self._watches and os.getppid() != self._parent:
                    logs.error("exit", cause=f"the host process {self._parent} is gone")
                    self._asked = signal.SIGTERM
                silent |= _kill_stopped(processes, stopped)
            self._note_end(processes, silent, kills)
            return first.returncode
        finally:
            until = time.monotonic() + _FOLLOWERS_GRACE
            for process in processes:
                _ended(process, max(until - time.monotonic(), 0.0))

    def _note_end(
        self, processes: Sequence[subprocess.Popen[bytes]], silent: set[int], kills: int
    ) -> None:
        """Store which rank a signal has ended.

        silent: those that this supervisor has killed.
        kills: `kills_for_memory` at their start.
        """
        first = 0 if self._plan.place is None else self._plan.place.rank
        for rank, process in enumerate(processes, first):
            code = process.poll() or 0
            if process.pid in silent:
                self._end = f"rank {rank} had been stopped for too long"
            elif code < 0:
                ran_out = kills_for_memory() > kills
                self._end = end_of(f"rank {rank}", code, out_of_memory=ran_out)

    def _stop(self, first: subprocess.Popen[bytes]) -> int:
        assert self._asked is not None
        if self._is_worker:  # it only waits for rank 0, and has no calls to finish
            first.kill()
            first.wait()
            return 0
        first.send_signal(self._asked)
        code = _ended(first, _GRACE)
        # A rank that is still starting has no handler yet, so the signal itself ends it.
        return 0 if code == -self._asked else code

    def _pause(self, seconds: float) -> None:
        """Wait for a signal, at most that many seconds."""
        if select.select([self._wake], [], [], seconds)[0]:
            os.read(self._wake, 4096)


def _kill_stopped(
    processes: Sequence[subprocess.Popen[bytes]], since: dict[int, float]
) -> set[int]:
    """Kill the ranks that a signal has stopped for longer than `_MOST_STOPPED`.

    The ranks cannot notice that themselves before they are connected.

    since: when each rank was first found stopped.

    Returns the process ids of those killed.
    """
    killed = set()
    now = time.monotonic()
    for process in processes:
        if process.poll() is not None or not is_stopped(process.pid):
            since.pop(process.pid, None)
        elif now - since.setdefault(process.pid, now) >= _MOST_STOPPED:
            process.kill()
            killed.add(process.pid)
    return killed


def _ended(process: subprocess.Popen[bytes], grace: float) -> int:
    """Return the exit code of a process, which is killed if it takes too long."""
    try:
        return process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback interface, below those that outgoing connections get.

    MLX binds the ports of its ring when the first model is loaded, which may be hours later.
    """
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = secrets.choice(_PORTS)
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as fault:
                if fault.errno != errno.EADDRINUSE:
                    raise
            else:
                found.append(port)
        return found
