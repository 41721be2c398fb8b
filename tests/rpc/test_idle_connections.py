"""Connections without calls keep neither loads nor other clients out."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from queue import Queue

import grpc
import pytest

from backend.rpc import server
from tests.acceptance.backend import Backend, chat, text_answer
from tests.rpc.conftest import Running
from tests.rpc.fake_engine import FakeEngine
from tests.rpc.frames import PREFACE, SETTINGS, frame
from tests.rpc.process import WAIT
from wire import backend_pb2 as pb

FILES = 400


@contextmanager
def impatient(limit: str) -> Iterator[Running]:
    """A server with a short time limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, limit, 0.1)
        running = Running(FakeEngine())
    with closing(running):
        yield running


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is set as on Linux")
def test_a_load_finds_descriptors_although_idle_connections_use_up_the_rest() -> None:
    backend = Backend(["--files", str(FILES), str(FILES)])
    try:
        backend.stub.Health(pb.HealthMessage(), timeout=WAIT)  # it is connected before the others
        with ExitStack() as connections:
            for _ in range(FILES + 50):
                address = ("127.0.0.1", backend.port)
                connections.enter_context(socket.create_connection(address, WAIT))
            assert backend.load().success
            assert text_answer(backend, chat("Hello!", Tokens=4))
    finally:
        assert backend.close() == 0


@pytest.mark.parametrize(
    ("limit", "begin"),
    [("_HANDSHAKE_SECONDS", b""), ("_IDLE_SECONDS", PREFACE + frame(SETTINGS, 0, 0))],
)
def test_a_connection_without_a_call_is_closed(limit: str, begin: bytes) -> None:
    with (
        impatient(limit) as running,
        socket.create_connection(("127.0.0.1", running.port), WAIT) as client,
    ):
        client.sendall(begin)
        while client.recv(4096):
            pass


def test_a_client_whose_idle_connection_was_closed_connects_again() -> None:
    states: Queue[grpc.ChannelConnectivity] = Queue()
    with impatient("_IDLE_SECONDS") as running:
        running.channel.subscribe(states.put)
        for _ in range(3):
            assert running.stub.Health(pb.HealthMessage(), timeout=WAIT).message == b"OK"
            while states.get(timeout=WAIT) is not grpc.ChannelConnectivity.READY:
                pass
            while states.get(timeout=WAIT) is not grpc.ChannelConnectivity.IDLE:
                pass
