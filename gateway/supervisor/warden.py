"""The gateway's side of the wardens (`warden_process`), each of which starts one backend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

from gateway.supervisor.failures import LoadFailed
from gateway.supervisor.warden_process import BLOCKED, signal_group

SETTINGS = "MLX_GATEWAY_"
_ROOT = Path(__file__).parents[2]


def backend_environ(environ: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the gateway's environment without its own variables, and with `extra`.

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
        self,
        pid: int,
        stderr: FileIO,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        warden: subprocess.Popen[bytes],
    ) -> None:
        self.pid = pid
        self.stderr = stderr
        self._reader, self._writer = streams
        self._warden = warden

    def signal(self, number: signal.Signals) -> None:
        """Signal the process's group, if it still exists."""
        if not self._writer.is_closing():
            self._writer.write(bytes((number,)))

    async def wait(self) -> int | None:
        """Return the process's exit code (negative: a signal), once it and its group have ended.

        None if the warden was killed; the process is then killed as well, because nothing would end
        it together with the gateway.
        """
        try:
            code = await self._reader.readline()
        except ConnectionError:
            code = b""
        self._writer.close()
        await asyncio.to_thread(self._warden.wait)
        if code:
            return int(code)
        signal_group(self.pid, signal.SIGKILL)
        return None


PROGRAM = Path(__file__).with_name("warden_process.py")


async def spawn(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Child:
    """Start a command in a folder, by a warden of its own.

    Raises OSError or LoadFailed; then nothing is left over.
    """
    read_end, write_end = os.pipe()
    stderr = FileIO(read_end)
    link, warden_end = socket.socketpair()
    with contextlib.ExitStack() as failed:
        failed.callback(stderr.close)
        failed.callback(link.close)
        try:
            warden = _start((str(folder), *command), warden_end, write_end, environ)
        finally:
            warden_end.close()
            os.close(write_end)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=link)
            failed.callback(writer.close)
            answer: int | str = json.loads(await reader.readline() or _KILLED)
            if isinstance(answer, str):
                raise LoadFailed(f"no process could be started: {answer}")
        except BaseException:
            with contextlib.suppress(OSError):
                link.send(bytes((signal.SIGKILL,)))
                link.shutdown(socket.SHUT_RDWR)
            await asyncio.to_thread(warden.wait)
            raise
        failed.pop_all()
        return Child(answer, stderr, (reader, writer), warden)


_KILLED = json.dumps("the process that starts it was killed")


def _start(
    arguments: Sequence[str], link: socket.socket, stderr: int, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a warden. Raises OSError, or LoadFailed for a null byte."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        # Without close_fds (no descriptors are inheritable), subprocess uses posix_spawn, which
        # runs no fork handlers.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), *arguments],
            stdin=link.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            close_fds=False,
            env=dict(environ),
        )
    except ValueError as problem:
        raise LoadFailed(f"no process could be started: {problem}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
