"""Event streams: when the head is sent, what fills silence, and how streams end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from gateway.calls import Done, Event, Piece, ToolCallPiece, Usage
from gateway.errors import ApiError
from gateway.ollama.answer import OllamaAnswer, chat_part
from gateway.settings import GatewaySettings
from gateway.sse import Answer, EventStream, json_parts, respond
from tests.gateway.requests_begun import begun

SETTINGS = GatewaySettings(Path("models"), keepalive_interval=0)
BEAT = "data: waiting\n\n"
SCOPE: dict[str, Any] = {"type": "http"}


@pytest.fixture(autouse=True)
def _a_request_of_its_own() -> None:
    begun()


class Text(Answer[str]):
    """An answer whose events are their own text."""

    def take(self, event: str) -> list[str]:
        return [event]

    def beat(self) -> list[str]:
        return [BEAT]

    def whole(self) -> str:
        return ""


class Client:
    """The client's end of a response: keeps what is sent, and lets a test wait for it."""

    def __init__(self) -> None:
        self.status = 0
        self.bodies: list[bytes] = []
        self.ended = False
        self._news = asyncio.Event()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            assert self.status == 0
            self.status = message["status"]
        else:
            self.bodies.append(message["body"])
            self.ended = not message.get("more_body", False)
        self._news.set()

    async def receive(self) -> Message:
        raise AssertionError("the body was read before")

    async def until(self, body: bytes) -> None:
        """Wait until this was sent."""
        while body not in self.bodies:
            self._news.clear()
            await self._news.wait()


async def test_events_are_sent_as_they_arrive() -> None:
    async def events() -> AsyncGenerator[str, None]:
        yield "data: 1\n\n"
        yield "data: 2\n\n"

    client = Client()
    await EventStream(events(), Text(), SETTINGS)(SCOPE, client.receive, client.send)
    assert client.status == 200
    assert client.bodies == [b"data: 1\n\n", b"data: 2\n\n", b""]
    assert client.ended


class Parts(Text):
    """An answer each of whose events has two parts."""

    def take(self, event: str) -> list[str]:
        return [f"{event}1", f"{event}2"]


async def test_other_requests_have_their_turn_between_the_parts_of_one_event() -> None:
    async def events() -> AsyncGenerator[str, None]:
        yield "a"

    client = Client()
    asyncio.get_running_loop().call_soon(client.bodies.append, b"another")
    await EventStream(events(), Parts(), SETTINGS)(SCOPE, client.receive, client.send)
    assert client.bodies == [b"a1", b"another", b"a2", b""]


async def test_a_failure_before_the_first_event_keeps_its_status() -> None:
    closing = False

    async def events() -> AsyncGenerator[str, None]:
        if not closing:
            raise ApiError(404, "no")
        yield ""

    client = Client()
    with pytest.raises(ApiError, match="no"):
        await EventStream(events(), Text(), SETTINGS)(SCOPE, client.receive, client.send)
    assert client.status == 0


@pytest.mark.parametrize("failure", [ApiError(503, "gone"), ValueError("a secret")])
async def test_a_failure_during_the_stream_is_the_last_event(failure: Exception) -> None:
    async def events() -> AsyncGenerator[str, None]:
        yield "data: 1\n\n"
        raise failure

    client = Client()
    stream = EventStream(events(), Text(), SETTINGS)
    await stream(SCOPE, client.receive, client.send)
    assert client.bodies[0] == b"data: 1\n\n"
    assert client.bodies[1].startswith(b'data: {"error"')
    assert b"secret" not in client.bodies[1]
    assert client.bodies[2:] == [b""]


async def test_an_endless_stream_ends_with_an_error_event() -> None:
    """Waiting for a model counts as well, where no call of a backend exists that could time out."""

    async def events() -> AsyncGenerator[str, None]:
        yield "data: 1\n\n"
        await asyncio.Event().wait()

    client = Client()
    stream = EventStream(events(), Text(), replace(SETTINGS, request_timeout=0.05))
    await stream(SCOPE, client.receive, client.send)
    assert client.bodies[0] == b"data: 1\n\n"
    assert b"took longer than 0.05 s" in client.bodies[1]
    assert client.ended


async def test_silence_is_filled_before_and_between_events() -> None:
    client = Client()

    async def events() -> AsyncGenerator[str, None]:
        await client.until(BEAT.encode())
        client.bodies.clear()
        yield "data: 1\n\n"
        await client.until(BEAT.encode())
        raise ApiError(503, "gone")

    stream = EventStream(events(), Text(), replace(SETTINGS, keepalive_interval=0.001))
    await stream(SCOPE, client.receive, client.send)
    assert client.status == 200
    assert client.bodies[-2].startswith(b'data: {"error": {"message": "gone"')
    assert client.ended


async def test_a_disconnect_closes_the_events_at_once() -> None:
    closed: list[str] = []

    async def events() -> AsyncGenerator[str, None]:
        try:
            yield "data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            closed.append("events")

    client = Client()
    response = EventStream(events(), Text(), SETTINGS)
    running = asyncio.ensure_future(response(SCOPE, client.receive, client.send))
    await client.until(b"data: 1\n\n")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert closed == ["events"]
    assert not client.ended


def _chosen(count: int) -> list[dict[str, Any]]:
    """The log-probabilities of tokens, each with 20 alternatives."""
    token = {"token": "é", "logprob": -1.5, "bytes": [195, 169]}
    return [token | {"top_logprobs": [token] * 20}] * count


LONG: dict[str, Any] = {
    "/tokenize": {"tokens": list(range(100_000)), "count": 100_000, "token_strs": ["é"] * 9000},
    "/chat/completions": {
        "choices": [{"index": 0, "logprobs": {"content": _chosen(60), "refusal": None}}] * 99
    },
    "/completions": {"choices": [{"logprobs": {"top_logprobs": [{"é": -1.5}] * 9000}}]},
    "/responses": {
        "output": [{"content": [{"type": "output_text", "logprobs": _chosen(4000)}]}],
        "metadata": {},
    },
    "nothing": {"choices": [], "usage": {}, "text": "\u2028"},
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_answer_is_written_in_short_parts(name: str) -> None:
    """Between them, other threads have their turn."""
    parts = list(json_parts(LONG[name]))
    assert max(map(len, parts)) < 1 << 16
    assert "".join(parts) == json.dumps(LONG[name], ensure_ascii=False, separators=(",", ":"))


class Place(Text):
    """An answer that contains the thread that wrote it."""

    def whole(self) -> dict[str, Any]:  # type: ignore[override]
        return {"thread": threading.get_ident()}


@pytest.mark.parametrize("long", [False, True])
async def test_a_long_answer_is_written_on_a_thread(long: bool) -> None:
    async def events() -> AsyncGenerator[str, None]:
        request.long = long
        yield ""

    request = begun()
    response = await respond(events(), Place(), SETTINGS, streams=False)
    assert (json.loads(bytes(response.body))["thread"] == threading.get_ident()) is not long


@pytest.mark.parametrize("streams", [True, False])
async def test_half_of_a_character_in_a_call_is_replaced(streams: bool) -> None:
    """Models write it as an escape, which UTF-8 cannot represent."""

    async def events() -> AsyncGenerator[Event, None]:
        yield Piece(tool_calls=(ToolCallPiece(0, "c1", "look", '{"text": "\\ud83d!"}'),))
        yield Done("stop", Usage())

    client = Client()
    response = await respond(events(), OllamaAnswer("m", chat_part), SETTINGS, streams=streams)
    await response(SCOPE, client.receive, client.send)
    assert (client.status, client.ended) == (200, True)
    assert b'"?!"' in b"".join(client.bodies)
