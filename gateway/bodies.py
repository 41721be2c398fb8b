"""Reads a request's body into memory, within limits of size, memory and time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from common.wording import shown
from gateway import exchange
from gateway.errors import RETRY_AFTER, SERVER, ApiError
from gateway.leaving import run_until_left
from gateway.refusals import response_of
from gateway.settings import GatewaySettings

BODY_SECONDS = 30.0  # seconds of silence in the middle of a body
_MOST_ARRIVING = 8  # all bodies that are arriving may be this many times as large as the largest
# The codings of each header that do not compress, and the code of the refusal of others.
_PLAIN = {
    "Content-Encoding": ({"", "identity"}, "unsupported_content_encoding"),
    "Transfer-Encoding": ({"", "identity", "chunked"}, "unsupported_transfer_encoding"),
}
_BODY = "gateway.body"  # the key in a scope that has the body


class BodyMiddleware:
    """The middleware that reads or refuses a body, and cancels a request whose client has left."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._settings = settings
        self.arriving = 0  # bytes of all bodies that are arriving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            _require_plain(headers)
            scope[_BODY] = await self.read(headers, receive)
        except ApiError as refusal:
            await response_of(refusal, scope)(scope, receive, send)
            return
        await run_until_left(self._app, scope, receive, send, self._settings.request_timeout)

    async def read(self, headers: Headers, receive: Receive) -> bytearray:
        """Return the whole body.

        Raises ApiError 413 as soon as it is too long, 503 if it and others that are arriving take
        too much memory, 408 if it stops arriving, or takes longer than a request may.
        """
        largest = self._settings.max_body_bytes
        # uvicorn refuses a length that is not a number or is extremely long.
        if int(headers.get("content-length", "0")) > largest:
            raise _too_large(largest)
        body = bytearray()
        try:
            async for part in _parts(receive, self._settings.request_timeout or math.inf):
                body += part
                self.arriving += len(part)
                if len(body) > largest:
                    raise _too_large(largest)
                if self.arriving > _MOST_ARRIVING * largest:
                    raise ApiError(
                        503,
                        f"other requests are sending {self.arriving - len(body)} bytes at the"
                        " moment: send the request again later",
                        SERVER,
                        "overloaded",
                        retry_after=RETRY_AFTER,
                    )
        finally:
            self.arriving -= len(body)
        return body


def pop_body(scope: Scope) -> bytearray:
    """Remove the body from the scope of a request and return it, so that its last user frees it."""
    body: bytearray = scope.pop(_BODY)
    return body


def _require_plain(headers: Headers) -> None:
    for name, (plain, code) in _PLAIN.items():
        given = ",".join(headers.getlist(name))
        if not {each.strip().lower() for each in given.split(",")} <= plain:
            message = f"{name} is {shown(given)}: send the body as it is, without compression"
            raise ApiError(400, message, code=code)


async def _parts(receive: Receive, limit: float) -> AsyncIterator[bytes]:
    """Yield the parts of a body.

    limit: maximum seconds since the request began.
    """
    more = True
    while more:
        left = limit - exchange.current().seconds
        try:
            message = await asyncio.wait_for(receive(), min(BODY_SECONDS, left))
        except TimeoutError:
            late = f"the body took longer than {limit:g} s to arrive"
            silent = f"no part of the body arrived for {BODY_SECONDS:.0f} s"
            sentence = late if left < BODY_SECONDS else silent
            raise ApiError(408, sentence, code="request_timeout") from None
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body ended early", code="request_aborted")
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _too_large(largest: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {largest} bytes: send less, or start the gateway with a larger"
        " --max-body-bytes",
        code="request_too_large",
        extra_headers={"connection": "close"},
    )
