"""Starts, watches and ends the ranks of one machine, in a small separate process.

The supervisor has one thread and imports neither gRPC nor MLX, so nothing can delay its reaction to
a signal or to the end of a rank. It starts the ranks, and kills those that outlive rank 0. If a
rank is lost, it restarts all ranks, because MLX can form only one group per process.
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

from backend.engine.ranks.rank_info import LAST_LOAD, TOKEN, RankInfo, transport_environ
from backend.rpc import logs, parent_watch
from backend.rpc.monitor import is_stopped
from backend.supervising.command_line import Plan
from common.launch import command
from common.machine_memory import kills_for_memory
from common.process_end import end_of, wait_or_kill

# Linux gives outgoing connections ports from 32,768 on, and macOS from 49,152 on.
_PORTS = range(1 << 14, 1 << 15)
_GRACE = 10.0  # seconds after which rank 0 is killed if it does not shut down; it needs 7 at most
_REPORTS = 4.0  # seconds for which rank 0 may run after another rank ended, to report the loss
_FOLLOWERS_GRACE = 1.0  # seconds for which the other ranks may run after rank 0 has ended
_CHECK_SECONDS = 2.0  # seconds between two checks whether a signal has stopped a rank
# Seconds after which a rank that a signal has stopped is killed. Connected ranks notice each
# other's silence earlier, unless `rank_timeout` is longer.
_MOST_STOPPED = 45.0
# Ranks that end sooner than after _SHORT_LIFE seconds, _MOST_SHORT_LIVES times in a row, are not
# restarted.
_SHORT_LIFE = 20.0
_MOST_SHORT_LIVES = 3
_GIVEN_UP = 1
_MISUSED = 2
_SIGNALLED = 128  # exit code of a process that a signal ended: this plus the signal's number
Process = subprocess.Popen[bytes]
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """The ranks of one plan, as child processes."""

    def __init__(self, plan: Plan, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._environ = dict(environ)
        self._asked: signal.Signals | None = None  # the signal that asked this process to end
        self._end = ""  # says which rank a signal has ended, and why
        self._parent = os.getppid()
        self._watches = parent_watch.should_watch(environ, self._parent)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)

    def run(self) -> int:
        """Run until the ranks have ended for good.

        Returns the exit code of rank 0, or of the only rank of this machine. If a signal has ended
        the process, this is 128 plus the signal's number, as in a shell.
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
        """Whether only a rank other than 0 runs here, which is restarted until rank 0 answers."""
        return self._plan.info is not None and self._plan.info.rank > 0

    def _note(self, number: int, _: object) -> None:
        if number != signal.SIGCHLD and self._asked is None:
            self._asked = signal.Signals(number)

    def _start(self) -> list[Process]:
        Path(self._folder.name).mkdir(mode=0o700, exist_ok=True)  # the system may have cleaned /tmp
        if (info := self._plan.info) is not None:
            return [self._spawn(info, self._plan.hostfile, self._environ)]
        count = self._plan.count
        ports = free_ports(count + 1)
        hostfile = Path(self._folder.name) / "hosts.json"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:count]]))
        environ = {**self._environ, TOKEN: self._environ.get(TOKEN) or secrets.token_hex(16)}
        names = ("127.0.0.1",) * count
        return [
            self._spawn(
                RankInfo(rank, count, ("127.0.0.1", ports[count]), names), str(hostfile), environ
            )
            for rank in range(count)
        ]

    def _spawn(self, info: RankInfo, hostfile: str, environ: Mapping[str, str]) -> Process:
        own = {**environ, **transport_environ(info, hostfile, environ)}
        own.pop(parent_watch.SWITCH, None)  # the supervisor watches the host instead
        own[parent_watch.PARENT] = str(os.getpid())
        own[LAST_LOAD] = str(Path(self._folder.name) / "last_load")
        info.write(own)
        arguments = self._plan.rest if info.rank == 0 else ()
        return subprocess.Popen(
            command("-m", "backend", *arguments), env=own, stdin=subprocess.DEVNULL
        )

    def _run_once(self, processes: Sequence[Process]) -> int:
        """Wait until a rank ends, and end the others. Returns the exit code of the first rank."""
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
                    # Rank 0 notices the loss too, and reports it before it ends, unless rank 0 is
                    # stopped itself.
                    grace = 0.0 if is_stopped(first.pid) else _REPORTS
                    self._note_end(processes, silent, kills)
                    # The code is negative if rank 0 was killed, which is not why the ranks end.
                    return max(wait_or_kill(first, grace), 0) or _GIVEN_UP
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
                wait_or_kill(process, max(until - time.monotonic(), 0.0))

    def _note_end(self, processes: Sequence[Process], silent: set[int], kills: int) -> None:
        """Store in `_end` which rank a signal has ended, and why.

        silent: the process ids of the ranks that this supervisor has killed.
        """
        first = 0 if self._plan.info is None else self._plan.info.rank
        for rank, process in enumerate(processes, first):
            code = process.poll() or 0
            if process.pid in silent:
                self._end = f"rank {rank} had been stopped for too long"
            elif code < 0:
                ran_out = kills_for_memory() > kills
                self._end = end_of(f"rank {rank}", code, out_of_memory=ran_out)

    def _stop(self, first: Process) -> int:
        assert self._asked is not None
        if self._is_worker:  # it only waits for rank 0, and has no calls to finish
            first.kill()
            first.wait()
            return 0
        first.send_signal(self._asked)
        code = wait_or_kill(first, _GRACE)
        # A rank that is still starting has no handler yet, so the signal itself ends it.
        return 0 if code == -self._asked else code

    def _pause(self, seconds: float) -> None:
        if select.select([self._wake], [], [], seconds)[0]:
            os.read(self._wake, 4096)


def _kill_stopped(processes: Sequence[Process], since: dict[int, float]) -> set[int]:
    """Kill the ranks that a signal has stopped for longer than `_MOST_STOPPED`.

    Before the ranks are connected, they cannot notice this themselves. Returns the process ids of
    the killed ranks.

    since: by process id, when each rank was first found stopped; this function updates it.
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


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback interface that outgoing connections do not use.

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
