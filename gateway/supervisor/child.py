"""A process that the warden has started, at the gateway's end of its link."""

from __future__ import annotations

import asyncio
import signal
from io import FileIO

from gateway.supervisor.warden_process import signal_group


class Child:
    """`stderr` is the reading end of what it writes there, for the caller to close."""

    def __init__(
        self,
        pid: int,
        stderr: FileIO,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid = pid
        self.stderr = stderr
        self._reader = reader
        self._writer = writer

    def signal(self, number: signal.Signals) -> None:
        """Signal its process group, unless that is gone already."""
        if not self._writer.is_closing():
            self._writer.write(bytes((number,)))

    async def wait(self) -> int | None:
        """Its exit code (negative: a signal) once it is gone with its group.

        None if the warden was killed: the process is killed as well then, because nobody is left
        who would end it with the gateway.
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
