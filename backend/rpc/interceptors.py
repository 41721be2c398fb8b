"""The processing around every call: token, model identity, errors.

The token is checked before anything of a request is parsed. That interceptor covers all services of
the process, including reflection and grpc.health.v1, which use only a part of the second one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from backend.engine.errors import Cancelled, InvalidRequest, ShuttingDown
from backend.rpc import call_log, logs
from backend.rpc.last_load import QUEUED, LastLoad
from backend.rpc.request_limits import UnsentRequests, require_bounded
from backend.rpc.statuses import NotServed, status_of
from common.machine_memory import return_freed_memory

SERVICE = "backend.Backend"
REACHED = (("mlx-reached", "1"),)
_PREFIX = f"/{SERVICE}/"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behaviour = Callable[[Any, Context], Awaitable[Any]]
_LONG = 1 << 20  # bytes of a request whose memory glibc would keep
_SOON = 0.05  # seconds for gRPC to release a request
_LONGEST_OTHER = 4096  # bytes of a message: the name of a service, a file or a symbol


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """The interceptor that refuses every call without the token, even of Health."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()
        self._refused_before = False

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Handler:
        given = b""
        for key, value in details.invocation_metadata:
            if key == "authorization":
                given = value if isinstance(value, bytes) else value.encode("utf-8", "replace")
        if hmac.compare_digest(given, self._wanted):
            return await continuation(details)
        # Only the first wrong token, because a host without one would fill the log.
        level = logging.DEBUG if self._refused_before else logging.WARNING
        self._refused_before = True
        logs.event(level, "refused", {"rpc": details.method, "why": "invalid token"})
        return _REFUSAL


def _refusing(code: grpc.StatusCode, message: str) -> Handler:
    """Return a handler that refuses a call of any kind."""

    async def refuse(_requests: Any, context: Context) -> None:
        await context.abort(code, message)

    return grpc.stream_stream_rpc_method_handler(refuse)


_REFUSAL = _refusing(grpc.StatusCode.UNAUTHENTICATED, "invalid token")


def _not_served(path: str) -> Handler:
    """Return a handler that refuses a method of LocalAI's protocol, and None for other methods."""
    if not path.startswith(_PREFIX):
        return None
    message = (
        f"{path.removeprefix(_PREFIX)[:64]} is not served: this backend runs models that generate"
        " text, embed, rank or label it, or turn speech into it; use another backend for this call"
    )
    status = status_of(NotServed(message))
    return _refusing(status.code, status.message)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The interceptor that parses requests, checks the model identity, and maps exceptions.

    refuse_when_full: raises Overloaded while the queue is full. This is called before the method,
        because there may be far more requests than can be served, and refusing one must take little
        time.
    """

    def __init__(self, last_load: LastLoad, refuse_when_full: Callable[[], None]) -> None:
        self._last_load = last_load
        self._refuse_when_full = refuse_when_full
        self._closed = False
        self._answered: Container[str] = ()
        self._unsent = UnsentRequests()

    def close(self, *, but: Container[str] = ()) -> None:
        """Refuse further calls, because the process is stopping.

        but: methods that are still served.
        """
        self._closed = True
        self._answered = but

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Handler:
        handler: Any = await continuation(details)
        if handler is None:
            return _not_served(details.method)
        own = details.method.startswith(_PREFIX)
        method = details.method.removeprefix(_PREFIX)
        serve = self._serve if own else self._serve_other
        call = self._around(method, lambda context: serve(method, handler, context), own=own)
        # gRPC leaves a unary call without an answer if its client sends no message.
        kind = (
            grpc.stream_unary_rpc_method_handler
            if own and not handler.response_streaming
            else grpc.stream_stream_rpc_method_handler
        )
        return kind(call, response_serializer=handler.response_serializer)

    def _around(
        self, method: str, serve: Callable[[Context], Awaitable[Any]], *, own: bool
    ) -> Behaviour:
        """Return the call with a log line and a status. Other services log only failures."""

        async def call(_requests: Any, context: Context) -> Any:
            notes = call_log.begin()
            started = time.monotonic()
            try:
                reply = await serve(context)
            except asyncio.CancelledError:
                if own:
                    call_log.cancelled(method, notes, started)
                raise
            except grpc.aio.AbortError:
                raise
            except grpc.aio.InternalError as error:  # the client has just reset the call
                status = status_of(Cancelled("the call was cancelled"))
                if own:
                    call_log.cancelled(method, notes, started)
                error.__traceback__ = None
            except Exception as error:
                status = status_of(error)
                call_log.failed(method, notes, started, status, error)
                error.__traceback__ = None
            else:
                if own:
                    call_log.succeeded(method, notes, started)
                return reply
            # An exception and the frames in its traceback refer to each other, which would keep a
            # request of up to 50 MiB until the next garbage collection. So the error's traceback is
            # dropped above, and this frame, from which `abort` raises another exception, has none.
            return await context.abort(status.code, status.message, status.trailers)

        return call

    async def _serve(self, method: str, handler: Any, context: Context) -> Any:
        raw = b""
        try:
            message = await self._unsent.read(context)
            if message is grpc.aio.EOF:
                raise _without_request(method)
            raw = bytes(message)
            del message
            return await self._answer(method, handler, raw, context)
        finally:
            if len(raw) > _LONG:
                _return_memory_soon()

    async def _serve_other(self, method: str, handler: Any, context: Context) -> None:
        """Serve grpc.health.v1 or reflection.

        Without the limits, gRPC would accept and retain messages of 50 MiB.
        """

        async def requests() -> AsyncIterator[Any]:
            raw = await self._unsent.read(context)
            while raw is not grpc.aio.EOF:
                if len(raw) > _LONG:
                    _return_memory_soon()
                if len(raw) > _LONGEST_OTHER:
                    raise InvalidRequest(
                        f"the request of {method} has {len(raw)} bytes: it may have at most"
                        f" {_LONGEST_OTHER}"
                    )
                yield _parsed(method, handler, raw)
                raw = await context.read()

        if handler.stream_stream:
            async for reply in handler.stream_stream(requests(), context):
                await context.write(reply)
            return
        async for request in requests():
            if handler.unary_stream:
                await handler.unary_stream(request, context)
            else:
                await context.write(await handler.unary_unary(request, context))
            return
        raise _without_request(method)

    async def _answer(self, method: str, handler: Any, raw: bytes, context: Context) -> Any:
        if self._closed and method not in self._answered:
            raise ShuttingDown
        require_bounded(handler.request_deserializer.__self__, raw)
        if len(raw) > _LONG:
            # glibc keeps the buffers in which the request arrived, which gRPC has freed.
            await asyncio.to_thread(return_freed_memory)
        request = _parsed(method, handler, raw)
        self._last_load.check(method, request)
        if method in QUEUED:
            self._refuse_when_full()
        # From here on, the request could be the cause if the process crashes. This metadata tells
        # the host that the call was reached and should not be repeated.
        await context.send_initial_metadata(REACHED)
        behaviour: Behaviour = handler.unary_stream or handler.unary_unary
        answered = behaviour(request, context)
        del request  # the engine has its own copy, and an answer may take long
        return await answered


def _parsed(method: str, handler: Any, raw: bytes) -> Any:
    try:
        return handler.request_deserializer(raw)
    except DecodeError:
        raise InvalidRequest(
            f"the request of {method} cannot be read: a string in it is not valid UTF-8,"
            " or its bytes are cut short"
        ) from None


def _without_request(method: str) -> InvalidRequest:
    return InvalidRequest(f"{method} was called without a request: send one message")


def _return_memory_soon() -> None:
    """Return the memory of the current call to the system, on a thread because it takes time."""
    loop = asyncio.get_running_loop()
    loop.call_later(_SOON, loop.run_in_executor, None, return_freed_memory)
