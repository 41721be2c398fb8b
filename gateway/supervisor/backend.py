"""A backend with a loaded model: a process that was started here, or one at an address."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from common.child_environment import backend_environ
from gateway.calls import Stub, is_cancelled
from gateway.models.config import OWN_BACKENDS, ModelConfig
from gateway.supervisor.failures import LoadFailed
from gateway.supervisor.process import OWN_RUN, TOKEN, BackendProcess
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

_CONTEXT_SIZE, _CONTEXT_REASON = "mlx-context-size", "mlx-context-reason"
_TOKENS = re.compile("[1-9][0-9]{0,8}")  # other backends may report anything
_CLOSE_GRACE = 5.0  # seconds for calls to end with the status that the backend gives them
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_START_LIMIT = 60.0  # seconds from the start to the first successful Health
_REACH_LIMIT = 5.0  # seconds to Health for a backend that should already be running
_PROBE_LIMIT = 2.0  # for one Health call while it starts
_PROBE_PAUSE = 0.05
_FREE_LIMIT = 5.0
_STOP_GRACE = 15.0  # seconds, as LocalAI waits
_SILENT_GRACE = 1.0  # for a backend that has never answered
_END_LIMIT = 1.0  # seconds between a lost connection and the end of the process


def _authorized(stub: Stub, token: str) -> Stub:
    """Add a token to the metadata of every call of a stub.

    Interceptors would do the same, at a cost for every message of every stream.
    """

    entry = ("authorization", f"Bearer {token}")

    def start(method: Callable[..., Any], request: Any, *, metadata: Any = (), **given: Any) -> Any:
        return method(request, metadata=(*metadata, entry), **given)

    for name, method in vars(stub).items() if token else ():
        setattr(stub, name, functools.partial(start, method))
    return stub


class Backend:
    """One backend and the channel to it; `process` is None if it was not started here."""

    def __init__(self, process: BackendProcess | None, address: str, token: str) -> None:
        self.process = process
        self.doubted = self.emptied = False
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self.stub = _authorized(backend_pb2_grpc.BackendStub(self._channel), token)

    @classmethod
    async def start(cls, config: ModelConfig, label: str) -> Backend:
        """Return a backend that answers Health. Raises LoadFailed, with nothing left running."""
        if config.address:
            backend = cls(None, config.address, os.environ.get(TOKEN, ""))
        else:
            run = OWN_RUN if config.backend in OWN_BACKENDS else Path(config.backend)
            environ = backend_environ(os.environ, config.env)
            process = await BackendProcess.start(run, label, environ)
            try:
                port = await process.listening()
            except BaseException:
                await process.stop(0)
                raise
            backend = cls(process, f"127.0.0.1:{port}", process.token)
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
                while not await self.healthy(_PROBE_LIMIT):
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

    def doubt(self, *, emptied: bool) -> None:
        """Have the backend checked before the next lease, because it seems dead.

        emptied: whether it has lost its model.
        """
        self.doubted = True
        self.emptied = self.emptied or emptied

    @property
    def up(self) -> bool:
        """Whether the channel is connected."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def healthy(self, limit: float) -> bool:
        """Return whether Health answers `OK`. Raises LoadFailed for a wrong token."""
        try:
            reply: pb.Reply = await self.stub.Health(pb.HealthMessage(), timeout=limit)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise LoadFailed(
                    "the backend requires a token other than LOCALAI_GRPC_AUTH_TOKEN"
                ) from None
            return False
        except grpc.aio.UsageError:  # closed meanwhile
            return False
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return False
        return reply.message == b"OK"

    async def load(self, model: pb.ModelOptions) -> tuple[int, str]:
        """Send LoadModel, without a time limit.

        Returns the context in tokens, 0 if it is unknown, and why it is shorter than the model's.

        Raises LoadFailed, which says how the process ended if it has.
        """
        call = self.stub.LoadModel(model)
        try:
            result: pb.Result = await call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await self.raise_if_ended(_PROBE_LIMIT)
                lost = "the connection to the backend was lost during the load"
                raise LoadFailed(lost) from None
            reason = error.details() or f"LoadModel failed with {error.code().name}"
            busy = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            raise LoadFailed(reason, busy=busy) from None
        if not result.success:
            raise LoadFailed(result.message or "LoadModel failed without saying why")
        trailers = dict(await call.trailing_metadata() or ())
        tokens, reason = (str(trailers.get(n, "")) for n in (_CONTEXT_SIZE, _CONTEXT_REASON))
        return int(tokens) if _TOKENS.fullmatch(tokens) else 0, reason

    async def memory(self, limit: float) -> int:
        """Return the bytes that the backend uses; 0 if it does not report them."""
        try:
            status: pb.StatusResponse = await self.stub.Status(pb.HealthMessage(), timeout=limit)
        except grpc.aio.AioRpcError:
            return 0
        return status.memory.total

    @property
    def alive(self) -> bool:
        """Whether a request sent now can be answered, as far as the system knows."""
        running = self.process is None or self.process.alive
        return running and self.up and not self.doubted and not self.emptied

    async def answers(self, limit: float) -> bool:
        """Return whether the backend runs, has its model, and answers Health within `limit` s."""
        if self.emptied or (self.process is not None and not self.process.alive):
            return False
        try:
            self.doubted = not await self.healthy(limit)
        except LoadFailed:
            self.doubted = True
        return not self.doubted

    async def stop(self, free: bool, grace: float = _STOP_GRACE) -> None:
        """Call Free if requested; then end the process, then close the connection.

        The end of the process ends open calls. If closing the connection ended them, their readers
        would report that the client has disconnected.
        """
        try:
            if free:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await self.stub.Free(pb.HealthMessage(), timeout=_FREE_LIMIT)
            if self.process is not None:
                await self.process.stop(grace)
        finally:
            await self._channel.close(_CLOSE_GRACE)

    async def end(self) -> str:
        """Kill a backend that does not answer. Returns a message that says what was wrong."""
        if self.process is None:
            lost = "has lost its model" if self.emptied else "no longer answers"
            return f"the backend {lost}"
        self.process.kill("the backend no longer answered")
        return await self.process.exited

    async def ending(self) -> str:
        """Return how the process ended; "" if it still runs, or was not started here."""
        if self.process is not None:
            await asyncio.wait((self.process.exited,), timeout=_END_LIMIT)
            if self.process.exited.done():
                return self.process.exited.result()
        return ""
