"""uvicorn's HTTP parser with limits on a request's head, which is read before keys are checked."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

LONGEST_HEAD = 64 << 10  # bytes; nginx accepts 32 KiB
HEAD_SECONDS = 30.0
MOST_WAITING = 1000  # requests that a client sends before the first is answered
_INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
_PROBE_SECONDS, _MOST_PROBE_SECONDS, _OLD_SECONDS = 0.05, 5.0, 1.0
_TOO_LONG = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
# An Upgrade header, which Java's client sends with every POST. The parser would then skip the body,
# although a server may ignore the header.
_OFFER = re.compile(rb"[A-Z]{3,7} \S+ HTTP/1\.1\r\n(?:[^\r\n]+\r\n)*?(?=upgrade:)", re.IGNORECASE)


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed if its request line and headers are too long or too slow."""

    _head = 0  # bytes of the head so far
    _between = 0  # bytes since the head or a part of the body: chunk sizes, trailers
    _reading_head = True
    _timer: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def data_received(self, data: bytes) -> None:
        # The part of a body that arrives in the same read is limited by the size of a read.
        if self._reading_head:
            self._head += len(data)
            if self._head > LONGEST_HEAD and b"\r\n\r\n" not in data:
                self._refuse(_TOO_LONG, f"the headers are longer than {LONGEST_HEAD} bytes")
                return
        self._between += len(data)
        in_body = self.cycle is not None and self.cycle.more_body
        if not in_body and (offer := _OFFER.match(data)):
            data = data[: offer.end()] + b"ignored-" + data[offer.end() :]
        idle, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if idle is not None and (self._reading_head or not self.cycle.response_complete):
            idle.cancel()
        else:  # an empty line, or the rest of a body that was refused, is not a request
            self.timeout_keep_alive_task = idle
        if self._between > LONGEST_HEAD and not self._reading_head:
            self._refuse(_TOO_LONG, f"the trailers are longer than {LONGEST_HEAD} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)
        if self._answered is not None:  # uvicorn informs only the latest request
            self._answered.disconnected = True
            self._answered.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open while an answer is due.

        A client may close only its sending side. A client that has left cannot be distinguished
        from it until something is sent, so interim responses are sent, which every client of
        HTTP/1.1 skips. A client of HTTP/1.0 does not know them; it counts as gone if its response
        does not begin soon.
        """
        last, answered = self.cycle, self._answered
        if last is None or last.more_body or last.response_complete or self._began(answered):
            return False
        last.keep_alive = False
        self._probe(_PROBE_SECONDS)
        return True

    def _probe(self, pause: float) -> None:
        if self.transport.is_closing() or self._began(self._answered):
            return
        if self.scope["http_version"] == "1.1":
            self.transport.write(_INTERIM)
        elif pause > _OLD_SECONDS:
            self.transport.close()
        self.loop.call_later(pause, self._probe, min(2 * pause, _MOST_PROBE_SECONDS))

    @staticmethod
    def _began(cycle: RequestResponseCycle | None) -> bool:
        return cycle is None or cycle.response_started

    def on_message_begin(self) -> None:
        self._begin_head()
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._between = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._end_head()
        self._between = 0
        _, absolute, rest = self.url.partition(b"://")
        if absolute and not self.url.startswith(b"/"):  # this host counts (RFC 9112, 3.2.2)
            host = re.split(rb"[/?]", rest)[0]
            if host and not rest.startswith(host + b"/"):  # no path, which the parser refuses
                self.url = b"/" + rest[len(host) :]
            # Their number stays, because other numbers than one are refused.
            self.headers[:] = [(n, host if n == b"host" else value) for n, value in self.headers]
        super().on_headers_complete()
        if len(self.pipeline) > MOST_WAITING:
            self.transport.abort()
        elif self.pipeline:
            self.flow.resume_reading()  # otherwise the client could leave unnoticed

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _without_chunks(app, cycle) if old else app)

    def _begin_head(self) -> None:
        if not self._reading_head or self._timer is None:
            self._reading_head, self._head = True, 0
            message = f"the headers took longer than {HEAD_SECONDS:g} s"
            self._timer = self.loop.call_later(
                HEAD_SECONDS, self._refuse, HTTPStatus.REQUEST_TIMEOUT, message
            )

    def _end_head(self) -> None:
        self._reading_head = False
        if self._timer is not None:
            self._timer.cancel()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._end_head()
        if self.transport.is_closing():
            return
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: text/plain\r\n"
            f"content-length: {len(message)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write((head + message).encode())
        self.transport.close()


def _without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """Return an application whose responses end with the connection, as HTTP/1.0 has no chunks."""
    cycle.chunked_encoding = False

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_whole(message: Any) -> None:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_whole)

    return answer
