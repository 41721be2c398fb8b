"""From a command to a process that the warden knows of.

The process leads a session of its own, so that a signal to its group reaches whatever it starts,
and none that is meant for the gateway. It begins as a shell that waits for one word before it
becomes the backend: the word is given once the warden knows of it, and a gateway that is killed
before has closed the pipe. So there is no moment at which a backend could stay behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from gateway.supervisor.failures import LoadFailed
from gateway.supervisor.warden import Warden, signal_group

_GATE = 'read -r go && exec "$@" </dev/null'
_WORD = b"go\n"
Child = asyncio.subprocess.Process


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process, and what it writes to stderr, for the caller to close.

    The pipe is ours, because asyncio does not tell of a process's end while anybody, such as a
    child of it, holds one of its own open.
    """

    child: Child
    stderr: FileIO


async def spawn(
    command: Sequence[str], folder: Path, environ: Mapping[str, str], warden: Warden
) -> Spawned:
    """Start a command in a folder. Raises LoadFailed; nothing stays behind then."""
    with contextlib.ExitStack() as closing:

        def pipe() -> tuple[int, int]:
            ends = os.pipe()
            for end in ends:
                closing.callback(os.close, end)
            return ends

        try:
            (gate, word), (stderr, pen) = pipe(), pipe()
            child = await _child(command, folder, environ, gate, pen)
            try:
                warden.watch(child.pid)
                os.write(word, _WORD)
                return Spawned(child, FileIO(os.dup(stderr)))
            except OSError:
                signal_group(child.pid, signal.SIGKILL)
                warden.groups.discard(child.pid)
                raise
        except OSError as problem:
            said = f"no process could be started: {problem.strerror}"
            raise LoadFailed(said) from None


async def _child(
    command: Sequence[str], folder: Path, environ: Mapping[str, str], stdin: int, stderr: int
) -> Child:
    """The process behind its gate; whoever gives up waiting leaves none."""
    creating = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", _GATE, "sh", *command),
            cwd=folder,
            env=environ,
            stdin=stdin,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    )
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            signal_group((await creating).pid, signal.SIGKILL)
        raise
