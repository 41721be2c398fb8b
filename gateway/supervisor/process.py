"""One backend as a process: its start, its log, and its end together with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from common.launch import command
from common.machine_memory import kills_for_memory
from common.process_end import end_of, tells_fault
from common.progress_bar import DOWNLOAD, DOWNLOADED
from common.version import VERSION
from gateway import logs
from gateway.supervisor.failures import LoadFailed
from gateway.supervisor.warden_process import signal_group

PROGRAM = Path(__file__).with_name("warden_process.py")
_WAITING = ThreadPoolExecutor(1 << 16, "backends")  # two threads for each backend
OWN_RUN = Path(__file__).parents[2] / "run.sh"  # need not exist: a wheel has none
TOKEN = "LOCALAI_GRPC_AUTH_TOKEN"
_PARENT_WATCH = "LOCALAI_BACKEND_PARENT_WATCH"
_LISTENING = re.compile(r"\bevent=listening addr=\S+:([0-9]+)\b(?:.* version=(\S+))?")
# Left out, because the supervisor logs why a backend refused a model. Internal errors have another
# level, and a traceback.
_REFUSED_LOAD = re.compile(r" level=info event=call rpc=LoadModel status=(?!OK |CANCELLED )")
_LONGEST_LINE = 8192
_READ_SECONDS = 1.0  # seconds for reading the output of a dead process

_log = logging.getLogger("gateway.supervisor")


def _started(
    command: Sequence[str], folder: Path, environ: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """Start a command in a folder. Returns its process, and the warden that ends it if we cannot.

    Raises OSError, or ValueError for a null byte, with nothing left running. Each gets a process
    group, so that it can be signalled as a whole, and gets no signals that are meant for the
    gateway.
    """
    warden = _warden()
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
        )
    except BaseException:
        _end(warden)
        raise
    _entrust(warden, process.pid)
    return process, warden


def _warden() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        process_group=0,
    )


def _entrust(warden: subprocess.Popen[bytes], group: int) -> None:
    assert warden.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the warden was killed
        warden.stdin.write(b"%d\n" % group)


def _end(warden: subprocess.Popen[bytes]) -> None:
    warden.kill()
    warden.communicate()


class BackendProcess:
    """A running backend. `exited` is done when it has ended, with a message that says why."""

    def __init__(
        self, process: subprocess.Popen[bytes], warden: subprocess.Popen[bytes], name: str
    ) -> None:
        self.pid = process.pid
        self.token = ""
        self.port = 0
        self._last_line = ""
        self.download: tuple[int, int] | None = None  # MiB downloaded so far, and in all
        self._process = process
        self._warden = warden
        self._replacing = threading.Lock()
        self._name = name
        self._version: str | None = None  # the version of our own backend, once it listens
        self._fault = ""  # the last line that tells a fault
        self._killed = ""  # why this gateway ended the process
        self._kills = kills_for_memory()
        self._bound = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read())
        self.exited = asyncio.ensure_future(self._until_gone())

    @classmethod
    async def start(cls, run: Path, name: str, environ: dict[str, str]) -> BackendProcess:
        """Start `run` on a free loopback port, with a new token in its environment.

        Our own backend is started without its run.sh, with port 0, and prints its choice. Another
        run.sh is given a port that is free now, and ends with a message if another process takes
        it first. Raises LoadFailed.
        """
        token = secrets.token_urlsafe(32)
        secret = {TOKEN: token, _PARENT_WATCH: "on"}
        try:
            own = run == OWN_RUN
            port = 0 if own else _free_port()
            program = command("-m", "backend") if own else [str(run)]
            address = ("--addr", f"127.0.0.1:{port}")
            started = _started((*program, *address), run.parent, environ | secret)
        except OSError as problem:
            place = f"{problem.filename}: " if problem.filename else ""
            raise LoadFailed(f"no process could be started: {place}{problem.strerror}") from None
        except ValueError as problem:  # a null byte
            raise LoadFailed(f"no process could be started: {problem}") from None
        self = cls(*started, name)
        self.port = port
        self.token = token
        return self

    @property
    def alive(self) -> bool:
        """Whether the process runs now. The system is asked, because notifications are delayed."""
        return not self.exited.done() and _running(self.pid)

    async def listening(self) -> int:
        """Return the port, once the process has printed it.

        Raises LoadFailed if the process ends before that, or if another version was installed after
        this gateway had started.
        """
        if not self.port:
            bound = asyncio.ensure_future(self._bound.wait())
            await asyncio.wait((bound, self.exited), return_when=asyncio.FIRST_COMPLETED)
            bound.cancel()
        if self.exited.done():
            raise LoadFailed(self.exited.result())
        if self._version not in (None, VERSION):
            raise LoadFailed(
                f"version {self._version or '?'} has been installed while this gateway, of version"
                f" {VERSION}, was running: restart the gateway"
            )
        return self.port

    async def stop(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace` seconds; return when the process has ended."""
        why = "the gateway stopped the backend"
        try:
            if not self.exited.done():
                self._killed = why if self.alive else ""
                self._signal(signal.SIGTERM)
                await asyncio.wait((self.exited,), timeout=grace)
        finally:  # also if this task is cancelled
            self.kill(why)
        await asyncio.wait((self.exited,))

    def kill(self, why: str) -> None:
        """Send SIGKILL to the whole group, if it still exists; `exited` then says why."""
        if not self.exited.done():
            self._killed = self._killed or (why if self.alive else "")
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:  # otherwise another group may have its id
            signal_group(self.pid, number)

    def _wait(self) -> int:
        """Return the exit code (negative: a signal), once the process and its group have ended."""
        code = self._process.wait()
        signal_group(self.pid, signal.SIGKILL)  # its children must not outlive it
        with self._replacing:
            _end(self._warden)
        return code

    def _guard(self) -> None:
        """Replace a killed warden, until the process has ended."""
        while self._warden.wait() < 0:
            with self._replacing:
                if self._process.returncode is not None:
                    return
                _log.warning("%s: the warden was killed, and is replaced", self._name)
                self._warden = _warden()
                _entrust(self._warden, self.pid)

    async def _until_gone(self) -> str:
        loop = asyncio.get_running_loop()
        guarded = loop.run_in_executor(_WAITING, self._guard)
        code = await loop.run_in_executor(_WAITING, self._wait)
        with contextlib.suppress(OSError):  # no other warden could be started
            await guarded
        await asyncio.wait((self._reader,), timeout=_READ_SECONDS)
        self._reader.cancel()
        ran_out = kills_for_memory() > self._kills
        # Ranks that start again write the cause of an exit, and go on; a signal may come later.
        line = self._last_line if code < 0 else self._fault
        return self._killed or end_of("the backend", code, line, out_of_memory=ran_out)

    async def _read(self) -> None:
        stream = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), self._process.stderr
        )
        pending = b""
        try:
            while chunk := await stream.read(1 << 16):
                *lines, pending = (pending + chunk).replace(b"\r", b"\n").split(b"\n")
                pending = pending[:_LONGEST_LINE]
                for line in lines:
                    self._take_line(line)
            self._take_line(pending)
        finally:
            pipe.close()

    def _take_line(self, raw: bytes) -> None:
        line = raw[:_LONGEST_LINE].decode(errors="replace").strip()
        if not line:
            return
        self._last_line = line
        if tells_fault(line):
            self._fault = line
        if match := DOWNLOAD.search(line):
            self.download = int(match[1]), int(match[2])
        elif DOWNLOADED in line and self.download:
            self.download = self.download[1], self.download[1]
        if not _REFUSED_LOAD.search(line):
            logs.pass_on(self._name, line)
        if not self.port and (match := _LISTENING.search(line)):
            self.port, self._version = int(match[1]), match[2] or ""
            self._bound.set()


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
