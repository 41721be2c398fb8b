"""The uvicorn server: SIGTERM drains and exits with 0, a second SIGTERM exits immediately.

While it drains, the gateway still listens, so that /ready can report it and clients get an answer
that says when to retry, instead of a closed port.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import time
from types import FrameType

import psutil
import uvicorn
from fastapi import FastAPI

from gateway.arguments import BadArgument
from gateway.exchange import Traffic
from gateway.greeting import Greeting
from gateway.http_protocol import BoundedProtocol
from gateway.settings import GatewaySettings
from gateway.supervisor.supervisor import Supervisor

# Nothing should be running after the drain; what still runs is cancelled.
_LAST_SECONDS = 1
_ECHO = 0.2  # seconds
_BACKLOG = 2048
_MOST_FILES = 65_536
# Partial garbage collections, each of some 7,000 new objects: after so many, a full one must wait
# no longer for the end of all long requests.
MOST_PUT_OFF = 1000
_FEWEST = 10  # partial collections, as in Python
_OBJECTS = 28_000  # four times the new objects of a partial collection


class Server(uvicorn.Server):
    """uvicorn's server, which drains before it ends."""

    def __init__(
        self,
        app: FastAPI,
        settings: GatewaySettings,
        supervisor: Supervisor,
        traffic: Traffic,
        greeting: Greeting,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                http=BoundedProtocol,
                timeout_graceful_shutdown=_LAST_SECONDS,
                timeout_keep_alive=75,
            )
        )
        self._settings = settings
        self._supervisor = supervisor
        self._traffic = traffic
        self._greeting = greeting
        self._drain: asyncio.Task[None] | None = None
        self._echo_until = 0.0
        self._fewest = _FEWEST

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """Begin to drain, or exit immediately. Called inside a signal handler.

        `make` and similar programs forward a signal that the whole group receives; such an echo is
        ignored.
        """
        if not self._traffic.draining:
            self._traffic.draining = True
            self._echo_until = time.monotonic() + _ECHO
        elif time.monotonic() > self._echo_until:
            _leave_at_once()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end. Called ten times a second."""
        if not self._traffic.draining:
            self._greeting.update()
            self._collect()
            self.should_exit = self.should_exit or self._greeting.failed
        elif self._drain is None:
            self._drain = asyncio.create_task(self._end_when_drained())
        return await super().on_tick(counter)

    def _collect(self) -> None:
        """Collect all garbage, if there may be enough, and no long body is in memory.

        A full collection visits every object and holds the interpreter's lock meanwhile, so the
        150,000 objects of a body of 1 MB would stop all streams for more than 100 ms. As in Python,
        the next one waits until a quarter more objects were created.
        """
        if gc.get_count()[2] > self._fewest and not self._traffic.long:
            gc.collect()
            self._fewest = max(_FEWEST, len(gc.get_objects()) // _OBJECTS)

    async def _end_when_drained(self) -> None:
        if not await self._traffic.drain(self._settings.drain_timeout):
            # Without its backend a stream ends with an error event, instead of breaking off.
            await self._supervisor.stop(after=self._settings.drain_timeout)
            await self._traffic.drain(_LAST_SECONDS)
        self.should_exit = True


def _leave_at_once() -> None:
    """Exit without waiting after a second signal, but leave no backend behind."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    os._exit(1)


def allow_connections() -> None:
    """Raise the soft limit of open files, whose default is too low for many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 chooses a free port. Raises BadArgument."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        raise BadArgument(f"--host {host} is not an address of this machine") from None
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:  # clients may connect as soon as the address is printed
        return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BadArgument(f"port {port} is in use: give another --port, or 0") from None
        reason = os.strerror(error.errno or 0)
        raise BadArgument(f"{host} port {port} cannot be used: {reason}") from None


def url_of(listener: socket.socket) -> str:
    """Return the listener's URL, without a path."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
