"""Cancels a request whose client has disconnected, and one that takes too long.

ASGI reports a disconnect only from `receive`, which handlers do not call while they answer. So one
task listens while another works, and the first to end cancels the other. This also cancels the gRPC
call, so that the backend frees the slot within a step.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import exchange
from gateway.errors import too_slow
from gateway.refusals import response_of

# Seconds beyond the limit in which backend calls and streams, which share it, may report it.
_GRACE = 2.0


async def run_until_left(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, seconds: float
) -> None:
    """Run an application for a request whose body has been read.

    It is cancelled when the client disconnects, and after `seconds` (0: never). After that time the
    client gets a 504, unless a response has begun.
    """
    left = asyncio.Event()
    given = False

    async def replay() -> Message:
        nonlocal given
        if not given:
            given = True
            # The body is in the scope; FastAPI only checks whether there is one.
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    work = asyncio.ensure_future(app(scope, replay, send))
    listener = asyncio.ensure_future(listen())
    try:
        limit = seconds + _GRACE if seconds else None
        await asyncio.wait({work, listener}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        elif left.is_set():
            exchange.current().left = True
        elif not exchange.current().status:
            await _end(work)
            await response_of(too_slow(seconds), scope)(scope, replay, send)
    finally:
        listener.cancel()
        await _end(work)


async def _end(work: asyncio.Future[None]) -> None:
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
