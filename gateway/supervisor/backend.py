"""A backend with a loaded model: a process that was started here, or one at an address."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from gateway.models.config import OWN_BACKENDS, ModelConfig
from gateway.supervisor.connection import Connection
from gateway.supervisor.failures import LoadFailed
from gateway.supervisor.process import OWN_RUN, TOKEN, BackendProcess
from gateway.supervisor.warden import backend_environ
from wire import backend_pb2 as pb

_START_LIMIT = 60.0  # seconds from the start to the first successful Health
_REACH_LIMIT = 5.0  # seconds to Health for a backend that should already be running
_PROBE_LIMIT = 2.0  # for one Health call while it starts
_PROBE_PAUSE = 0.05
_FREE_LIMIT = 5.0
_STOP_GRACE = 15.0  # seconds, as LocalAI waits
_SILENT_GRACE = 1.0  # for a backend that has never answered
_END_LIMIT = 1.0  # seconds between a lost connection and the end of the process


class Backend:
    """One backend and the connection to it; `process` is None if it was not started here."""

    def __init__(self, process: BackendProcess | None, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.doubted = False  # a request found that the backend is dead
        self.emptied = False  # a request was answered with "no model is loaded"

    @classmethod
    async def start(cls, config: ModelConfig, label: str) -> Backend:
        """Return a backend that answers Health. Raises LoadFailed, with nothing left running."""
        if config.address:
            backend = cls(None, Connection(config.address, os.environ.get(TOKEN, "")))
        else:
            run = OWN_RUN if config.backend in OWN_BACKENDS else Path(config.backend)
            environ = backend_environ(os.environ, config.env)
            process = await BackendProcess.start(run, label, environ)
            try:
                port = await process.listening()
            except BaseException:
                await process.stop(0)
                raise
            backend = cls(process, Connection(f"127.0.0.1:{port}", process.token))
        try:
            await backend._until_healthy()
        except BaseException:
            await backend.stop(free=False, grace=_SILENT_GRACE)
            raise
        return backend

    async def _until_healthy(self) -> None:
        limit = _START_LIMIT if self.process else _REACH_LIMIT
        try:
            async with asyncio.timeout(limit):
                while not await self.connection.healthy(_PROBE_LIMIT):
                    await self.raise_if_ended(_PROBE_PAUSE)
        except TimeoutError:
            raise LoadFailed(f"the backend does not answer Health within {limit:.0f} s") from None

    async def raise_if_ended(self, seconds: float) -> None:
        """Wait `seconds`; raise LoadFailed immediately if the process ends within that time."""
        if self.process is None:
            await asyncio.sleep(seconds)
            return
        await asyncio.wait((self.process.exited,), timeout=seconds)
        if self.process.exited.done():
            raise LoadFailed(self.process.exited.result())

    async def load(self, model: pb.ModelOptions) -> int:
        """Send LoadModel. Returns the context in tokens; 0 if the backend does not report it.

        Raises LoadFailed, which says how the process ended if it has.
        """
        try:
            return await self.connection.load(model)
        except ConnectionError:
            await self.raise_if_ended(_PROBE_LIMIT)
            raise LoadFailed("the connection to the backend was lost during the load") from None

    @property
    def alive(self) -> bool:
        """Whether a request sent now can be answered, as far as the system knows."""
        running = self.process is None or self.process.alive
        return running and self.connection.up and not self.doubted and not self.emptied

    async def answers(self, limit: float) -> bool:
        """Return whether it still runs, has its model, and answers Health within `limit` s."""
        if self.emptied or (self.process is not None and not self.process.alive):
            return False
        try:
            self.doubted = not await self.connection.healthy(limit)
        except LoadFailed:
            self.doubted = True
        return not self.doubted

    async def stop(self, free: bool, grace: float = _STOP_GRACE) -> None:
        """Call Free if requested; then end the process, then close the connection."""
        try:
            if free:
                await self.connection.free(_FREE_LIMIT)
            if self.process is not None:
                await self.process.stop(grace)
        finally:
            await self.connection.close()

    async def end(self) -> str:
        """Kill a backend that does not answer. Returns a message that says what was wrong."""
        if self.process is None:
            lost = "has lost its model" if self.emptied else "no longer answers"
            return f"the backend {lost}"
        self.process.kill("the backend no longer answered")
        return await self.process.exited

    async def ending(self) -> str:
        """Return how the process ended; "" if it was not started here, or is still running."""
        if self.process is not None:
            await asyncio.wait((self.process.exited,), timeout=_END_LIMIT)
            if self.process.exited.done():
                return self.process.exited.result()
        return ""
