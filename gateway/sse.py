"""Server-sent events: the only way in which answers stream to clients.

The status line waits for the first event, which comes when the backend has accepted the request, so
that an earlier error keeps its own HTTP status; a request that waits for its model begins
immediately. During silence the stream regularly sends an event that the API's clients know: many of
them give up on a stream that sends only comments. A failure after that is an event of its own: a
stream never just ends. If a client disconnects, the task that runs the response is cancelled
(`gateway.limits`); this closes the events immediately and cancels the work that produces them.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any, ClassVar, Generic, TypeVar

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from common.log_lines import traceback_of
from gateway import exchange, logs
from gateway.errors import SERVER, ApiError, too_slow
from gateway.settings import GatewaySettings

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would buffer the events
}
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
    whole = answer.whole()
    if isinstance(whole, str):
        return PlainTextResponse(whole)
    # The arguments of a call may contain half of a surrogate pair, which UTF-8 cannot represent.
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode(errors="replace"), media_type="application/json")


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the stream (ASGI). Raises the error of the events if nothing was sent yet."""
        writer = _Writer(send, self.status_code, self.raw_headers)
        keeper = asyncio.ensure_future(writer.keep_alive(self._interval, self._beat))
        try:
            await self._send_events(writer)
        except Exception as fault:
            if not writer.begun:
                raise
            error = fault if isinstance(fault, ApiError) else _FAULT
            if error is _FAULT:
                logs.error("stream failed", traceback=traceback_of(fault))
            exchange.current().broken = error.code or error.type
            await writer.write(self._encoded(self._answer.fail(error)))
        finally:
            keeper.cancel()
        await writer.write(b"", more=False)

    async def _send_events(self, writer: _Writer) -> None:
        """Send the events within a request's time limit, which includes waiting for a model."""
        left = self._limit - exchange.current().seconds if self._limit else None
        try:
            async with aclosing(self._events) as events, asyncio.timeout(left):
                async for event in events:
                    if body := self._encoded(self._answer.take(event)):
                        await writer.write(body)
        except TimeoutError:
            raise too_slow(self._limit) from None

    def _beat(self) -> bytes:
        return self._encoded(self._answer.beat())

    def _encoded(self, parts: list[Any]) -> bytes:
        return self._answer.write(parts).encode(errors="replace")


class _Writer:
    """Sends bytes, and records when. Two tasks write: the events and the keep-alive."""

    def __init__(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = False
        self._send = send
        self._start = {"type": "http.response.start", "status": status, "headers": headers}
        self._lock = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send some bytes, the head of the response before the first."""
        async with self._lock:
            await self._write(body, more=more)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        if not self.begun:
            self.begun = True
            await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._last = self._clock()

    async def keep_alive(self, interval: float, beat: Callable[[], bytes]) -> None:
        """Send a beat when the model has to load, and per `interval` s of silence (0: never)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(interval or None):
                await exchange.current().waits.wait()
            await self.write(beat())
        while interval > 0:
            async with self._lock:  # a client that reads slowly is not in silence
                silence = self._clock() - self._last
                if silence >= interval:
                    await self._write(beat())
                    silence = 0
            await asyncio.sleep(interval - silence)
