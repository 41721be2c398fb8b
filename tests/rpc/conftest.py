"""A real server on a real port, with a scripted engine behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from backend.rpc.address import Address
from backend.rpc.server import MOST_BYTES, Server
from tests.rpc.fake_engine import FakeEngine
from wire import backend_pb2_grpc

WAIT = 240.0  # seconds, on a busy machine too
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", MOST_BYTES),
)


class Running:
    """A server whose event loop has its own thread, so that tests can call it like any client."""

    def __init__(self, engine: FakeEngine, token: str = "") -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server: Server = self.run(self._made(engine, token))
        self.port: int = self.run(self.server.start(Address("127.0.0.1", 0)))
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", options=CHANNEL_OPTIONS)
        self.stub = backend_pb2_grpc.BackendStub(self.channel)

    async def _made(self, engine: FakeEngine, token: str) -> Server:
        return Server(engine, token)

    def later(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.later(work).result(WAIT)

    def refuse_new(self) -> None:
        self._loop.call_soon_threadsafe(self.server.refuse_new)

    def close_calls(self) -> None:
        """Stop the server once every call has ended and been logged."""
        self.run(self.server.stop(WAIT))

    def close(self) -> None:
        self.channel.close()
        self.run(self.server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT)
        self._loop.close()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def running(engine: FakeEngine) -> Iterator[Running]:
    server = Running(engine)
    yield server
    server.close()


@pytest.fixture
def stub(running: Running) -> backend_pb2_grpc.BackendStub:
    return running.stub


@pytest.fixture
def guarded(engine: FakeEngine) -> Iterator[Running]:
    server = Running(engine, token="s3cret")
    yield server
    server.close()
