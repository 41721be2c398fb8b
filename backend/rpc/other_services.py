"""Sets limits and errors for the calls of grpc.health.v1 and of server reflection.

Without them, gRPC would accept and retain messages of 50 MiB, would never answer a call without a
message, and would log a traceback for each message that cannot be read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from backend.engine.errors import InvalidRequest
from backend.rpc import call_log
from backend.rpc.long_requests import LONG, return_memory_soon
from backend.rpc.statuses import status_of
from backend.rpc.unsent_requests import UnsentRequests

_LONGEST = 4096  # bytes of a message: the name of a service, a file or a symbol
Context = grpc.aio.ServicerContext[Any, Any]


def checked(method: str, handler: Any, unsent: UnsentRequests) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler of the same kind, with a limit on its messages and with our errors."""

    async def requests(context: Context) -> AsyncIterator[Any]:
        raw = await unsent.read(context)
        while raw is not grpc.aio.EOF:
            yield _request(method, handler, raw)
            raw = await context.read()

    async def serve(context: Context) -> None:
        if handler.stream_stream:
            async for reply in handler.stream_stream(requests(context), context):
                await context.write(reply)
            return
        async for request in requests(context):
            if handler.unary_stream:
                await handler.unary_stream(request, context)
            else:
                await context.write(await handler.unary_unary(request, context))
            return
        raise InvalidRequest(f"{method} was called without a request: send one message")

    async def call(_requests: Any, context: Context) -> None:
        notes, started = call_log.begin(), time.monotonic()
        try:
            await serve(context)
        except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.InternalError):
            raise
        except Exception as error:
            status = status_of(error)
            call_log.failed(method, notes, started, status, error)
            error.__traceback__ = None
        else:
            return
        await context.abort(status.code, status.sentence)

    return grpc.stream_stream_rpc_method_handler(
        call, response_serializer=handler.response_serializer
    )


def _request(method: str, handler: Any, raw: bytes) -> Any:
    if len(raw) > _LONGEST:
        if len(raw) > LONG:
            return_memory_soon()
        raise InvalidRequest(
            f"the request of {method} has {len(raw)} bytes: it may have at most {_LONGEST}"
        )
    try:
        return handler.request_deserializer(raw)
    except DecodeError:
        raise InvalidRequest(
            f"the request of {method} cannot be read: its bytes are damaged"
        ) from None
