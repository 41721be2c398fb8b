"""One backend as a process: started, listened to, ended with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from gateway.supervisor.failures import LoadFailed, end_of
from gateway.supervisor.spawn import Spawned, spawn
from gateway.supervisor.warden import Warden, signal_group

OWN_RUN = Path(__file__).parents[2] / "run.sh"
TOKEN = "LOCALAI_GRPC_AUTH_TOKEN"
_PARENT_WATCH = "LOCALAI_BACKEND_PARENT_WATCH"
_LISTENING = re.compile(r"\bevent=listening addr=\S+:([0-9]+)\b")
_LEVEL = re.compile(r"level=(error|warning|debug)\b")
_LONGEST_LINE = 8192
_LAST_WORDS = 1.0  # seconds for what a dead process has written to be read
_log = logging.getLogger("gateway.backend")


class BackendProcess:
    """A running backend. `exited` is done when it is gone, with a sentence that says why."""

    def __init__(self, spawned: Spawned, name: str, warden: Warden) -> None:
        self.pid = spawned.child.pid
        self.token = ""
        self.port = 0
        self.last_line = ""
        self._child = spawned.child
        self._stderr = spawned.stderr
        self._name = name
        self._warden = warden
        self._bound = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read())
        self.exited = asyncio.ensure_future(self._until_gone())

    @classmethod
    async def start(
        cls, run: Path, name: str, environ: dict[str, str], warden: Warden
    ) -> BackendProcess:
        """Start `run` on a free loopback port, with a token of its own in its environment.

        Our own run.sh is given port 0 and tells its choice; another is given a port that is free
        now, and ends with a sentence if somebody takes it first. Raises LoadFailed.
        """
        token = secrets.token_urlsafe(32)
        port = 0 if run == OWN_RUN else _free_port()
        command = (str(run), "--addr", f"127.0.0.1:{port}")
        secret = {TOKEN: token, _PARENT_WATCH: "on"}
        spawned = await spawn(command, run.parent, environ | secret, warden)
        self = cls(spawned, name, warden)
        self.port = port
        self.token = token
        return self

    @property
    def alive(self) -> bool:
        """Whether it runs at this moment; asks the system, because news of an end take a while."""
        return not (self.exited.done() or _ended(self.pid))

    async def listening(self) -> int:
        """The port, once the process has told it. Raises LoadFailed if it ends before."""
        if not self.port:
            bound = asyncio.ensure_future(self._bound.wait())
            await asyncio.wait((bound, self.exited), return_when=asyncio.FIRST_COMPLETED)
            bound.cancel()
        if self.exited.done():
            raise LoadFailed(self.exited.result())
        return self.port

    async def stop(self, grace: float) -> None:
        """SIGTERM, `grace` seconds, SIGKILL; returns when the process is gone."""
        try:
            if not self.exited.done() and signal_group(self.pid, signal.SIGTERM):
                await asyncio.wait((self.exited,), timeout=grace)
        finally:  # also where whoever waits for this is cancelled
            self.kill()
        await asyncio.wait((self.exited,))

    def kill(self) -> None:
        """SIGKILL to the whole group, if it is still there."""
        if not self.exited.done():
            signal_group(self.pid, signal.SIGKILL)

    async def _until_gone(self) -> str:
        code = await self._child.wait()
        signal_group(self.pid, signal.SIGKILL)  # what it has started must not outlive it
        await asyncio.wait((self._reader,), timeout=_LAST_WORDS)
        self._reader.cancel()
        with contextlib.suppress(OSError):  # a warden that cannot be started again
            self._warden.forget(self.pid)
        return end_of(code, self.last_line)

    async def _read(self) -> None:
        stream = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), self._stderr
        )
        pending = b""
        try:
            while chunk := await stream.read(1 << 16):
                *lines, pending = (pending + chunk).replace(b"\r", b"\n").split(b"\n")
                pending = pending[:_LONGEST_LINE]
                for line in lines:
                    self._heard(line)
            self._heard(pending)
        finally:
            pipe.close()

    def _heard(self, raw: bytes) -> None:
        line = raw[:_LONGEST_LINE].decode(errors="replace").strip()
        if not line:
            return
        self.last_line = line
        level = _LEVEL.match(line)
        number = logging.getLevelNamesMapping()[level[1].upper()] if level else logging.INFO
        _log.log(number, "%s: %s", self._name, line)
        if not self.port and (match := _LISTENING.search(line)):
            self.port = int(match[1])
            self._bound.set()


def _ended(pid: int) -> bool:
    """Whether a child has ended, without collecting its exit code; False where nobody can tell."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def backend_environ(environ: Mapping[str, str], extra: dict[str, str]) -> dict[str, str]:
    """The gateway's environment without what its own start script set for it, and `extra`."""
    found = dict(environ)
    if found.get("PYTHONPATH") == str(OWN_RUN.parent):
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
            found.pop(name, None)
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        before = found.pop(f"MLX_BACKEND_{name}_BEFORE", None)
        if before:
            found[name] = before
        elif before is not None:
            found.pop(name, None)
    return found | extra
