"""The head of a request, and silent connections: limited before any key is known."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import http_protocol
from gateway.http_protocol import LONGEST_HEAD, BoundedProtocol
from tests.gateway.gateway_process import GatewayProcess, tiny

CROWD = 2000  # more than the soft limit of open files that most systems begin with
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


async def answering(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the whole body, and answers ok."""
    while (await receive()).get("more_body"):
        pass
    await PlainTextResponse("ok")(scope, receive, send)


async def echo(_: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body."""
    message = await receive()
    await PlainTextResponse(message["body"])(_, receive, send)


async def silent(_: Scope, receive: Receive, __: Send) -> None:
    """Never answers."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def listening(app: ASGIApp = answering, **settings: Any) -> AsyncIterator[int]:
    """The port of a server with this parser."""
    config = uvicorn.Config(
        app, port=0, http=BoundedProtocol, log_config=None, lifespan="off", **settings
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    running = asyncio.ensure_future(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await running


async def answer_to(port: int, *parts: bytes) -> bytes:
    """Everything that is sent back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
    found = await reader.read()
    writer.close()
    return found


async def half_closed(port: int, request: bytes) -> bytes:
    """Everything that is sent to a client that has closed its sending side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    writer.write_eof()
    found = await reader.read()
    writer.close()
    return found


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_a_client_that_closes_its_sending_side_gets_its_answer(version: bytes) -> None:
    async with listening() as port:
        found = await half_closed(port, HEAD.replace(b"HTTP/1.1", version) + b"\r\n")
    assert found.count(b" 200 OK") == 1
    assert found.endswith(b"\r\n\r\nok")
    assert version == b"HTTP/1.1" or b" 102 " not in found


async def test_an_old_client_that_leaves_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be sent an interim response."""
    monkeypatch.setattr(http_protocol, "_OLD_SECONDS", 0.01)
    async with listening(silent) as port:
        assert await half_closed(port, HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n") == b""


async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers in two parts."""

    async def parts() -> AsyncIterator[str]:
        yield "one "
        yield "two"

    await StreamingResponse(parts())(scope, receive, send)


@pytest.mark.parametrize(("version", "body"), [("1.0", b"one two"), ("1.1", b"4\r\none \r\n")])
async def test_a_stream_for_an_old_client_has_no_chunks(version: str, body: bytes) -> None:
    head = f"GET / HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    async with listening(streaming) as port:
        found, _, rest = (await answer_to(port, head)).partition(b"\r\n\r\n")
    assert (b"transfer-encoding" in found) == (version == "1.1")
    assert rest.startswith(body)
    assert b"connection: close" in found


async def test_an_endless_head_is_refused() -> None:
    async with listening() as port:
        found = await answer_to(port, HEAD, b"x-long: " + b"a" * LONGEST_HEAD)
    assert found.startswith(b"HTTP/1.1 431 ")
    assert b"longer than 65536 bytes" in found


async def test_a_long_body_does_not_count_as_head() -> None:
    async with listening() as port:
        length = f"content-length: {10 * LONGEST_HEAD}\r\nconnection: close\r\n\r\n".encode()
        post = HEAD.replace(b"GET", b"POST")
        found = await answer_to(port, post + length + b"a" * LONGEST_HEAD, b"a" * 9 * LONGEST_HEAD)
    assert found.startswith(b"HTTP/1.1 200 ")


CHUNKED = HEAD.replace(b"GET", b"POST") + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "more"),
    [(b"0\r\n", b"x-a: b\r\n"), (b"0\r\nx-a: ", b"a"), (b"1;x=", b"a")],
    ids=["lines", "a line", "a chunk"],
)
async def test_endless_trailers_are_refused(begun: bytes, more: bytes) -> None:
    """Limits of bodies and checks of keys see nothing of what comes after a body."""
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED.replace(b"transfer", b"expect: 100-continue\r\ntransfer"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(begun + more * (LONGEST_HEAD // len(more) + 1))
        found = await reader.read()
        writer.close()
    assert found.startswith(b"HTTP/1.1 431 ")


async def test_many_chunks_and_short_trailers_are_taken() -> None:
    async with listening() as port:
        chunks, end = b"1\r\na\r\n" * LONGEST_HEAD, b"0\r\nx-a: b\r\n\r\n"
        closing = CHUNKED.replace(b"transfer", b"connection: close\r\ntransfer")
        found = await answer_to(port, closing + chunks, end)
    assert found.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("begun", [b"", HEAD], ids=["nothing", "half a head"])
async def test_a_stalled_connection_is_closed(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)
    async with listening() as port:
        assert (await answer_to(port, begun)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("more", [b"\r\n", b"x"], ids=["an empty line", "a part of the body"])
async def test_a_client_that_stalls_after_its_answer_is_closed(more: bytes) -> None:
    """The answer may come before the body has."""
    length = b"content-length: 9\r\n" if more == b"x" else b""
    async with listening(PlainTextResponse("ok"), timeout_keep_alive=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + length + b"\r\n")
        await reader.readuntil(b"ok")
        writer.write(more)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_a_request_in_time_is_answered_and_its_connection_can_be_reused() -> None:
    async with listening() as port:
        found = await answer_to(port, HEAD + b"\r\n", HEAD + b"connection: close\r\n\r\n")
    assert found.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("offer", [b"websocket", b"h2c"])
async def test_an_offer_of_another_protocol_is_ignored(offer: bytes) -> None:
    """Java's HTTP client offers HTTP/2 in its first request, even if the request has a body."""
    offering = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + offer
    post = HEAD.replace(b"GET", b"POST") + offering + b"\r\ncontent-length: 4\r\n\r\nbody"
    async with listening(echo) as port:
        found = await answer_to(port, post, HEAD + b"connection: close\r\n\r\n")
    assert found.count(b"HTTP/1.1 200 ") == 2
    assert b"\r\n\r\nbody" in found


async def test_a_body_that_quotes_such_an_offer_stays_as_it_is() -> None:
    begun = asyncio.Event()

    async def echo_whole(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await PlainTextResponse(body)(scope, receive, send)

    quoted = HEAD + b"Upgrade: h2c\r\n\r\n"
    length = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(quoted)
    async with listening(echo_whole) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD.replace(b"GET", b"POST") + length)
        await begun.wait()
        writer.write(quoted)
        found = await reader.read()
        writer.close()
    assert found.endswith(b"\r\n\r\n" + quoted)


async def test_requests_sent_before_the_first_is_answered_are_answered_in_order() -> None:
    posts = [
        HEAD.replace(b"GET", b"POST") + b"content-length: 3\r\n\r\n" + str(number).encode()
        for number in range(100, 200)
    ]
    async with listening(echo) as port:
        found = await answer_to(port, b"".join(posts), HEAD + b"connection: close\r\n\r\n")
    assert re.findall(rb"\r\n\r\n(\d+)", found) == [post[-3:] for post in posts]


async def test_too_many_requests_before_an_answer_close_the_connection() -> None:
    async with listening(silent) as port:
        with contextlib.suppress(ConnectionResetError):
            assert await answer_to(port, (HEAD + b"\r\n") * (http_protocol.MOST_WAITING + 2)) == b""


@pytest.mark.parametrize("more", [0, 3])
async def test_the_request_that_is_answered_learns_that_its_client_left(more: int) -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def until_left(_: Scope, receive: Receive, __: Send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with listening(until_left) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((HEAD + b"\r\n") * (1 + more))
        await begun.wait()
        writer.close()
        await asyncio.wait_for(left.wait(), 60)


def test_many_silent_connections_keep_nobody_out() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * CROWD:
        pytest.skip(f"this system allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        gateway = GatewayProcess({"tiny": tiny()})
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * CROWD, hard))
        place = ("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        crowd = [socket.create_connection(place) for _ in range(CROWD)]
        for one in crowd[::2]:
            one.sendall(HEAD)
        try:
            body = {"model": "tiny", "max_tokens": 2, "prompt": "Hi"}
            assert gateway.client.post("/v1/completions", json=body).status_code == 200
        finally:
            for one in crowd:
                one.close()
            gateway.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
