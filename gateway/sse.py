"""Server-sent events: the only way in which answers stream to clients.

The status line waits for the first event, which comes when the backend has accepted the request, so
that an earlier error keeps its own HTTP status; a request that waits for its model begins
immediately. During silence the stream regularly sends an event that the API's clients know: many of
them give up on a stream that sends only comments. A failure after that is an event of its own: a
stream never just ends. If a client disconnects, the task that runs the response is cancelled
(`gateway.leaving`); this closes the events immediately and cancels the work that produces them.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, ClassVar, Generic, TypeVar

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from common.log_lines import traceback_of
from gateway import exchange, logs
from gateway.errors import SERVER, ApiError, too_slow
from gateway.settings import GatewaySettings
from gateway.threads import offload

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would buffer the events
}
_COMPACT: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
_LEVELS = 6  # of lists and objects above the log-probabilities of one token
_FLAT = 4096  # numbers or strings of a list
_FAULT = ApiError(500, "the gateway failed during this answer", SERVER, "internal_error")


class Answer(ABC, Generic[T]):
    """An answer in the form of one API. Pass every event of its generation to `take`, in order.

    `take`, `beat` and `fail` return parts of a stream: JSON objects, or the text of events.
    """

    media_type: ClassVar[str] = "text/event-stream"

    @abstractmethod
    def take(self, event: T) -> list[Any]:
        """Add an event."""

    def add(self, event: T) -> None:
        """Add an event to an answer that is sent in one piece."""
        self.take(event)

    @abstractmethod
    def beat(self) -> list[Any]:
        """Return a sign of progress, after the start of the answer if that has not been sent."""

    def fail(self, error: ApiError) -> list[Any]:
        """Return the last parts of an answer that failed: by default, OpenAI's error object."""
        return [error.body()]

    @abstractmethod
    def whole(self) -> dict[str, Any] | str:
        """Return the complete answer as JSON or as plain text, after its last event."""

    def write(self, parts: Iterable[Any]) -> str:
        """Return the text of parts, by default as server-sent events without names."""
        return "".join(
            part if isinstance(part, str) else f"data: {json.dumps(part)}\n\n" for part in parts
        )


class NamedEvents(Answer[T]):
    """An answer whose events are named by their `type`, as in Anthropic's API and in Responses."""

    def write(self, parts: Iterable[Any]) -> str:
        return "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in parts)


async def respond(
    events: AsyncGenerator[T, None], answer: Answer[T], settings: GatewaySettings, *, streams: bool
) -> Response:
    """Return the answer to a request, in one piece or as a stream."""
    if streams:
        return EventStream(events, answer, settings)
    async with aclosing(events):
        async for event in events:
            answer.add(event)
    whole = await offload(answer.whole)
    return PlainTextResponse(whole) if isinstance(whole, str) else await json_response(whole)


async def json_response(whole: Any) -> Response:
    """Return an answer that may be long, such as one with log-probabilities."""
    # The arguments of a call may contain half of a surrogate pair, which UTF-8 cannot represent.
    body = await offload(lambda: "".join(json_parts(whole)).encode(errors="replace"))
    return Response(body, media_type="application/json")


def json_parts(value: Any, levels: int = _LEVELS) -> Iterator[str]:
    """Yield the JSON of a value in parts, between which other threads have their turn.

    To write a million numbers in one part would stop every stream for 100 ms.
    """
    if levels and value and isinstance(value, dict):
        before = "{"
        for name, inner in value.items():
            yield before + json.dumps(name, **_COMPACT) + ":"
            yield from json_parts(inner, levels - 1)
            before = ","
        yield "}"
    elif levels and value and isinstance(value, Sequence) and not isinstance(value, str):
        flat = not isinstance(value[0], dict | list)
        for at in range(0, len(value), _FLAT if flat else 1):
            yield "," if at else "["
            if flat:
                yield json.dumps(value[at : at + _FLAT], **_COMPACT)[1:-1]
            else:
                yield from json_parts(value[at], levels - 1)
        yield "]"
    else:
        yield json.dumps(value, **_COMPACT)


class EventStream(Response, Generic[T]):
    """The response that streams an answer.

    During silence it sends what `Answer.beat` returns, perhaps as its first event. A failure after
    the stream has begun becomes what `Answer.fail` returns; an earlier failure is raised.
    """

    def __init__(
        self, events: AsyncGenerator[T, None], answer: Answer[T], settings: GatewaySettings
    ) -> None:
        super().__init__(headers=_HEADERS, media_type=answer.media_type)
        del self.headers["content-length"]
        self._events = events
        self._answer = answer
        self._interval = settings.keepalive_interval
        self._limit = settings.request_timeout
        self._lock = asyncio.Lock()  # two tasks write: the events and the keep-alive
        self._begun = False
        self._last = time.monotonic()  # when something was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the stream (ASGI). Raises the error of the events if nothing was sent yet."""
        keeper = asyncio.ensure_future(self._keep_alive(send))
        try:
            await self._send_events(send)
        except Exception as fault:
            if not self._begun:
                raise
            error = fault if isinstance(fault, ApiError) else _FAULT
            if error is _FAULT:
                logs.error("stream failed", traceback=traceback_of(fault))
            exchange.current().broken = error.code or error.type
            async with self._lock:
                await self._write(send, self._answer.fail(error))
        finally:
            keeper.cancel()
        async with self._lock:
            await self._write(send, [], more=False)

    async def _send_events(self, send: Send) -> None:
        """Send the events within a request's time limit, which includes waiting for a model."""
        left = self._limit - exchange.current().seconds if self._limit else None
        try:
            async with aclosing(self._events) as events, asyncio.timeout(left):
                async for event in events:
                    if parts := self._answer.take(event):
                        async with self._lock:
                            for part in parts:
                                await self._write(send, [part])
                                await asyncio.sleep(0)  # each may be long: others have their turn
        except TimeoutError:
            raise too_slow(self._limit) from None

    async def _keep_alive(self, send: Send) -> None:
        """Send a beat when the model has to load, and whenever nothing is sent for the interval."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._interval or None):
                await exchange.current().waits.wait()
            async with self._lock:
                await self._write(send, self._answer.beat())
        while self._interval > 0:
            async with self._lock:  # while a client reads slowly, the stream is not silent
                silence = time.monotonic() - self._last
                if silence >= self._interval:
                    await self._write(send, self._answer.beat())
                    silence = 0
            await asyncio.sleep(self._interval - silence)

    async def _write(self, send: Send, parts: list[Any], *, more: bool = True) -> None:
        """Send parts of the answer, and before the first the head. The caller holds the lock."""
        if not self._begun:
            self._begun = True
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
        body = self._answer.write(parts).encode(errors="replace")
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._last = time.monotonic()
