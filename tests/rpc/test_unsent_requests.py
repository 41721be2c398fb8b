"""Calls that are begun without a request take a limited amount of memory."""

from __future__ import annotations

import socket

import pytest

from backend.rpc import request_limits
from tests.polling import until
from tests.rpc.conftest import Running
from tests.rpc.frames import END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, head
from tests.rpc.process import WAIT
from wire import backend_pb2 as pb

REFUSAL = b"the call's request did not arrive: send one message"
METHODS = ("/backend.Backend/Predict", "/backend.Backend/Health", "/grpc.health.v1.Health/Check")


def begun(port: int, path: str, calls: int) -> socket.socket:
    """A connection with calls whose requests are not sent."""
    client = socket.create_connection(("127.0.0.1", port), WAIT)
    heads = (frame(HEADERS, END_HEADERS, 2 * n + 1, head(path)) for n in range(calls))
    client.sendall(PREFACE + frame(SETTINGS, 0, 0) + b"".join(heads))
    return client


def read_until(client: socket.socket, wanted: bytes) -> None:
    answers = b""
    while wanted not in answers:
        part = client.recv(65_536)
        assert part, answers
        answers += part


@pytest.mark.parametrize("path", METHODS)
def test_the_oldest_of_too_many_are_refused(
    running: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "MOST", 3)
    waiting = running.server._calls._unsent._waiting
    with begun(running.port, path, 2), begun(running.port, path, 1) as second:
        until(lambda: len(waiting) == 3)  # those of `third` must be younger
        assert running.stub.Health(pb.HealthMessage(), timeout=WAIT).message == b"OK"
        second.settimeout(WAIT)
        with begun(running.port, path, 8) as third:
            read_until(second, REFUSAL)
            read_until(third, REFUSAL)


@pytest.mark.parametrize("path", METHODS)
def test_a_request_that_does_not_arrive_ends_its_call(
    running: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(request_limits, "SECONDS", 0.05)
        with begun(running.port, path, 1) as client:
            read_until(client, REFUSAL)
    assert running.stub.Health(pb.HealthMessage(), timeout=WAIT).message == b"OK"
