"""The gateway's side of the warden (`warden_process`) and of the backends that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

from common.process_end import end_of
from gateway.supervisor.failures import LoadFailed
from gateway.supervisor.warden_process import BLOCKED, signal_group

SETTINGS = "MLX_GATEWAY_"
_ROOT = Path(__file__).parents[2]


def backend_environ(environ: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The gateway's environment without its own variables, and with `extra`.

    Its own are those of its start script, and its settings: these include keys, which code in a
    checkpoint must not read.
    """
    found = {name: value for name, value in environ.items() if not name.startswith(SETTINGS)}
    if found.get("PYTHONPATH") == str(_ROOT):
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
            found.pop(name, None)
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        before = found.pop(f"MLX_BACKEND_{name}_BEFORE", None)
        if before:
            found[name] = before
        elif before is not None:
            found.pop(name, None)
    return found | dict(extra)


class Child:
    """A started process. `stderr`: the reading end of its stderr, which the caller closes."""

    def __init__(
        self, pid: int, stderr: FileIO, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self.stderr = stderr
        self._reader = reader
        self._writer = writer

    def signal(self, number: signal.Signals) -> None:
        """Signal the process's group, if it still exists."""
        if not self._writer.is_closing():
            self._writer.write(bytes((number,)))

    async def wait(self) -> int | None:
        """The process's exit code (negative: a signal), once it and its group have ended.

        None if the warden was killed; the process is then killed as well, because nothing would end
        it together with the gateway.
        """
        try:
            code = await self._reader.readline()
        except ConnectionError:
            code = b""
        self._writer.close()
        if code:
            return int(code)
        signal_group(self.pid, signal.SIGKILL)
        return None


PROGRAM = Path(__file__).with_name("warden_process.py")
_CHECK_SECONDS = 1.0  # seconds between two checks whether the warden still runs
_log = logging.getLogger("gateway.supervisor")


class Warden:
    """Starts processes. The warden's own starts with the first one, and again if it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    async def spawn(
        self, command: Sequence[str], folder: Path, environ: Mapping[str, str]
    ) -> Child:
        """Start a command in a folder. Raises OSError or LoadFailed; then nothing is left over."""
        request = json.dumps([list(command), str(folder), dict(environ)])
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as passed:
            # macOS may lose a descriptor that is closed too early, so `passed` is closed after the
            # answer.
            ours, pen = os.pipe()
            stderr = failed.enter_context(FileIO(ours))
            passed.callback(os.close, pen)
            link, theirs = socket.socketpair()
            passed.enter_context(theirs)
            try:
                process = self._hand_over(theirs.fileno(), pen)
                reader, writer = await asyncio.open_unix_connection(sock=link)
            except BaseException:
                link.close()
                raise
            failed.callback(writer.close)
            failed.callback(writer.write, bytes((signal.SIGKILL,)))  # before the close
            writer.write(request.encode() + b"\n")
            answer = await _answer(reader, process)
            if isinstance(answer, str):
                raise LoadFailed(f"no process could be started: {answer}")
            failed.pop_all()
            return Child(answer, stderr, reader, writer)

    def _hand_over(self, *files: int) -> subprocess.Popen[bytes]:
        """Pass file descriptors to the warden; returns the warden's process. Raises OSError."""
        if self._process is not None and self._process.poll() is not None:
            end = end_of("the warden", self._process.returncode)
            _log.warning("starting another warden: %s", end)
            self._process = None
        process = self._process or self._start()
        assert self._socket is not None
        socket.send_fds(self._socket, [b"\0"], files)
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        if self._socket is not None:
            self._socket.close()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs, contextlib.ExitStack() as started:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
            started.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
            # Without close_fds (no descriptors are inheritable), subprocess uses posix_spawn, which
            # runs no fork handlers.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROGRAM)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                close_fds=False,
                env=backend_environ(os.environ, {}),
            )
        return self._process

    async def close(self) -> None:
        """End the warden, and with it every process that it has started."""
        if self._process is not None and self._socket is not None:
            self._socket.close()
            await asyncio.to_thread(self._process.wait)


async def _answer(reader: asyncio.StreamReader, process: subprocess.Popen[bytes]) -> int | str:
    """The pid of the started process, or a sentence that says why there is none."""
    while process.poll() is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CHECK_SECONDS):
                answer: int | str = json.loads(await reader.readline())
                return answer
    return "the process that starts backends was killed"
