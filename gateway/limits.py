"""Checks a request's body before it is used, and cancels requests whose client has disconnected.

FastAPI would read any amount, accept NaN as a number, and accept any nesting. Only a JSON object of
finite numbers and valid text passes, which every layer below can encode.

ASGI reports a disconnect only from `receive`, which handlers do not call while they answer. So one
task listens while another works, and the first to end cancels the other. This also cancels the gRPC
call, so that the backend frees the slot within a step.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from types import NoneType
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.wording import shown
from gateway import exchange
from gateway.errors import RETRY_AFTER, SERVER, ApiError, too_slow
from gateway.refusals import invalid, response_of
from gateway.settings import GatewaySettings

# Seconds beyond the limit in which backend calls and streams, which share it, may report it.
_GRACE = 2.0
# Nesting: the limit of pydantic's JSON parser, which counts only non-empty lists and objects.
DEEPEST = 200
MOST_OBJECTS = 200_000
_FAR_APART = 12  # bytes
BODY_SECONDS = 30.0  # seconds of silence in the middle of a body
_MOST_ARRIVING = 8  # all bodies that are arriving may be this many times as large as the largest
_THREADED = 32 << 10  # bytes of a body whose check may take 10 ms
_THREADS = ThreadPoolExecutor(2, "bodies")  # few, because they take turns with the event loop
_MARK = b"\xef\xbb\xbf"  # which editors and shells of Windows put before UTF-8
_NO_MARKS = bytes(set(range(256)) - set(b'"[{'))
# The latter two are curl's default, and aiohttp's, as LiteLLM calls Ollama.
_UNNAMED = ("", "application/x-www-form-urlencoded", "application/octet-stream")
_KINDS = {list: "a list", str: "a string", NoneType: "null"}
_HALF = rb"\\u[dD][%b][0-9a-fA-F]{2}"
_HIGH, _LOW = _HALF % b"89abAB", _HALF % b"c-fC-F"
# Half of a surrogate pair; before it, backslashes of which each escapes another.
_HALVES = re.compile(rb"((?<!\\)(?:\\\\)*)(?:(%b%b)|%b|%b)" % (_HIGH, _LOW, _HIGH, _LOW))
T = TypeVar("T")
_BODY = "gateway.body"  # the key in a scope that has the body


@dataclass
class Arriving:
    """The bytes of all bodies that are arriving."""

    nbytes: int = 0


class BodyMiddleware:
    """The middleware that reads or refuses a body, and cancels a request whose client has left."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._settings = settings
        self._arriving = Arriving()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            _require_plain(headers)
            scope[_BODY] = await read_body(headers, receive, self._settings, self._arriving)
        except ApiError as refusal:
            await response_of(refusal, scope)(scope, receive, send)
            return
        await run_until_left(self._app, scope, receive, send, self._settings.request_timeout)


class JsonRoute(APIRoute):
    """A route that parses its body: FastAPI would accept NaN as a number, and any nesting."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that also checks the body.

        FastAPI documents this way to extend routes.
        """
        handle = super().get_route_handler()

        async def with_body(request: Request) -> Response:
            # Free the body, because it may be large and the request may take long.
            body = pop_body(request.scope)
            if "POST" in (self.methods or ()) or self.body_field is not None:
                parsed = await parse(Headers(scope=request.scope), self._object(body))
                exchange.current().model = str(parsed.get("model") or "")[:200]
                MutableHeaders(scope=request.scope)["content-type"] = "application/json"
                # FastAPI accepts an object that is valid already.
                request._json = await offload(self._checked, parsed)
                del parsed
            del body
            return await handle(request)

        return with_body

    def _object(self, body: bytearray) -> bytearray:
        return body

    def _checked(self, body: dict[str, Any]) -> Any:
        if self.body_field is None:
            return body
        checked, problems = self.body_field.validate(body, {}, loc=("body",))
        if problems:
            raise invalid(problems)
        return checked


class ListRoute(JsonRoute):
    """A route whose body is a list, which becomes `adapters` of an object."""

    def _object(self, body: bytearray) -> bytearray:
        return bytearray(b'{"adapters":%b}' % bytes(body)) if body else body


def pop_body(scope: Scope) -> bytearray:
    """Remove the body from the scope of a request and return it, so that its last user frees it."""
    body: bytearray = scope.pop(_BODY)
    return body


async def offload(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of `work`, which runs on a thread if the body is long.

    Checking many small values takes a second, in which streams and other requests must continue.
    """
    return await _threaded(work, *arguments) if exchange.current().long else work(*arguments)


async def _threaded(work: Callable[..., T], *arguments: Any) -> T:
    run = functools.partial(copy_context().run, work, *arguments)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, run)


def _require_plain(headers: Headers) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(
            400,
            f"Content-Encoding is {shown(encoding)}: send the body as it is, without compression",
            code="unsupported_content_encoding",
        )


async def read_body(
    headers: Headers, receive: Receive, settings: GatewaySettings, arriving: Arriving | None = None
) -> bytearray:
    """Return the whole body.

    Raises ApiError 413 as soon as it is too long, 503 if it and others that are arriving take too
    much memory, 408 if it stops arriving, or takes longer than a request may.
    """
    largest = settings.max_body_bytes
    arriving = arriving or Arriving()
    # uvicorn refuses a length that is not a number or is extremely long.
    if int(headers.get("content-length", "0")) > largest:
        _too_large(largest)
    body = bytearray()
    try:
        async for part in _parts(receive, settings.request_timeout or math.inf):
            body += part
            arriving.nbytes += len(part)
            if len(body) > largest:
                _too_large(largest)
            if arriving.nbytes > _MOST_ARRIVING * largest:
                raise ApiError(
                    503,
                    f"other requests are sending {arriving.nbytes - len(body)} bytes at the moment:"
                    " send the request again later",
                    SERVER,
                    "overloaded",
                    retry_after=RETRY_AFTER,
                )
    finally:
        arriving.nbytes -= len(body)
    return body


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


async def parse(headers: Headers, body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError 400.

    Programs may send it without a content type, as curl does. A web page may not: browsers ask for
    permission before they send JSON to another origin, but not before they send a form.
    """
    if not body or body.isspace():  # `strip` would copy it
        raise ApiError(400, "the request has no body: send a JSON object")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and ("origin" in headers or kind not in _UNNAMED):
        raise ApiError(
            400,
            f"Unsupported content type: {shown(kind)}. Send 'Content-Type: application/json'",
            code="unsupported_content_type",
        )
    if len(body) <= _THREADED:
        return _parsed(body)
    exchange.current().long = True
    return await _threaded(_parsed, body)


def _parsed(body: bytes | bytearray) -> dict[str, Any]:
    if body.startswith(_MARK):
        body = body[len(_MARK) :]
    if _objects(body) > MOST_OBJECTS:
        raise ApiError(400, f"the body has more than {MOST_OBJECTS} lists and objects: send less")
    try:
        try:
            parsed = from_json(body, allow_inf_nan=False)
        except ValueError:
            if exchange.current().strict:
                raise
            # An agent cuts a tool's output in the middle of an emoji, and then sends it for ever.
            parsed = from_json(_HALVES.sub(_whole, body), allow_inf_nan=False)
    except ValueError as error:
        if str(error).startswith("recursion limit"):
            message = f"the body nests deeper than {DEEPEST} levels: flatten it"
            raise ApiError(400, message) from None
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        kind = _KINDS.get(type(parsed), "a number, true or false")
        raise ApiError(400, f"the body is {kind}: send a JSON object")
    _require_finite(parsed)
    return parsed


def _whole(found: re.Match[bytes]) -> bytes:
    """Return U+FFFD for half of a surrogate pair, and a complete pair unchanged."""
    return found[0] if found[2] else found[1] + rb"\ufffd"


def _objects(body: bytes | bytearray) -> int:
    """Return the number of lists and objects, exact only if they are many and close together.

    An empty list takes 3 bytes of a body and 60 of memory, so 50 MiB could become 1 GiB.
    """
    count = body.count(b"[") + body.count(b"{")
    if count <= MOST_OBJECTS or count * _FAR_APART < len(body):
        return 0
    # Brackets inside strings, such as code, cost nothing.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    return sum(map(len, bare.split(b'"')[::2]))


def _require_finite(parsed: dict[str, Any]) -> None:
    """Refuse numbers such as 1e999, which are parsed as infinite and cannot be written as JSON."""
    inner: list[Any] = [parsed]
    while inner:
        node = inner.pop()
        values = node.values() if isinstance(node, dict) else node
        kinds = set(map(type, values))  # a list may have millions of numbers
        if float in kinds and (math.inf in values or -math.inf in values):
            raise ApiError(
                400, "the body is not valid JSON: a number is too large", code="invalid_json"
            )
        if dict in kinds or list in kinds:
            inner += [value for value in values if isinstance(value, dict | list)]


def _too_large(largest: int) -> NoReturn:
    raise ApiError(
        413,
        f"the body is larger than {largest} bytes: send less, or start the gateway with a larger"
        " --max-body-bytes",
        code="request_too_large",
        extra_headers={"connection": "close"},
    )


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
