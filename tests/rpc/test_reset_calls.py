"""A client that resets its calls as soon as it has sent them costs the others nothing."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import psutil
import pytest

from tests.rpc.frames import (
    CANCEL,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    RESET,
    SETTINGS,
    frame,
    head,
)
from tests.rpc.process import WAIT, Process

MIB = 1 << 20


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process("--addr", "127.0.0.1:0")
    yield process
    process.close()


def test_calls_that_are_reset_at_once_do_not_fill_memory(process: Process) -> None:
    fields = head("/backend.Backend/Health")
    reset = struct.pack(">I", CANCEL)
    with socket.create_connection(("127.0.0.1", process.port()), WAIT) as client:
        before = psutil.Process(process.child.pid).memory_info().rss
        client.sendall(PREFACE + frame(SETTINGS, 0, 0))
        for first in range(1, 120_000, 2_000):
            calls = (
                frame(HEADERS, END_HEADERS, stream, fields) + frame(RESET, 0, stream, reset)
                for stream in range(first, first + 2_000, 2)
            )
            client.sendall(b"".join(calls))
        client.sendall(frame(PING, 0, 0, b"the last"))
        answers = b""
        while b"the last" not in answers:
            part = client.recv(65_536)
            assert part
            answers += part
        assert psutil.Process(process.child.pid).memory_info().rss - before < 250 * MIB
