"""The gateway's connection to one backend: a channel whose calls carry its token."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import grpc

from gateway.calls import is_cancelled
from gateway.generation import Stub
from gateway.supervisor.failures import LoadFailed
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

_CONTEXT_SIZE = "mlx-context-size"
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


class _Authorized:
    """A channel for a stub, whose calls carry one more metadata key.

    Interceptors would do the same, at a cost for every message of every stream.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        entry = (("authorization", f"Bearer {token}"),) if token else ()

        def wrapped(kind: Callable[..., Any]) -> Callable[..., Any]:
            def method(*path: Any, **serializers: Any) -> Callable[..., Any]:
                call = kind(*path, **serializers)

                def start(request: Any, *, metadata: Any = (), **given: Any) -> Any:
                    return call(request, metadata=(*(metadata or ()), *entry), **given)

                return start

            return method

        self.unary_unary = wrapped(channel.unary_unary)
        self.unary_stream = wrapped(channel.unary_stream)
        self.stream_unary = wrapped(channel.stream_unary)
        self.stream_stream = wrapped(channel.stream_stream)


class Connection:
    """A backend at `address` (host:port). A `limit` is in seconds."""

    def __init__(self, address: str, token: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        channel: Any = _Authorized(self._channel, token)
        self.stub: Stub = backend_pb2_grpc.BackendStub(channel)

    @property
    def up(self) -> bool:
        """Whether the socket is currently connected."""
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

    async def load(self, model: pb.ModelOptions) -> int:
        """Send LoadModel, without a time limit. Returns the context in tokens; 0 if it is unknown.

        Raises LoadFailed; ConnectionError if the backend is gone.
        """
        call = self.stub.LoadModel(model)
        try:
            result: pb.Result = await call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise ConnectionError from None
            reason = error.details() or f"LoadModel failed with {error.code().name}"
            busy = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            raise LoadFailed(reason, busy=busy) from None
        if not result.success:
            raise LoadFailed(result.message or "LoadModel failed without saying why")
        tokens = str(dict(await call.trailing_metadata() or ()).get(_CONTEXT_SIZE, ""))
        return int(tokens) if _TOKENS.fullmatch(tokens) else 0

    async def memory(self, limit: float) -> int:
        """Return the bytes that the backend uses; 0 if it does not report them."""
        try:
            status: pb.StatusResponse = await self.stub.Status(pb.HealthMessage(), timeout=limit)
        except grpc.aio.AioRpcError:
            return 0
        return status.memory.total

    async def free(self, limit: float) -> None:
        """Send Free; a failure does not matter, because the process is ended next."""
        try:
            await self.stub.Free(pb.HealthMessage(), timeout=limit)
        except grpc.aio.AioRpcError:
            return

    async def close(self) -> None:
        """Close the channel once its calls have ended.

        Closing a channel cancels its open calls, and their readers would report that the client has
        disconnected. So end the backend first: that ends its calls.
        """
        await self._channel.close(_CLOSE_GRACE)
