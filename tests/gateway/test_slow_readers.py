"""Streams that nobody reads: they block nobody, and use little memory."""

from __future__ import annotations

import json
import socket

import psutil

from tests.gateway.gateway_process import GatewayProcess, roomy
from tests.gateway.test_crowd import counted, request, until_idle

SLOW = 8
MIB = 1 << 20
MOST_GROWTH = 32 * MIB


def begin(gateway: GatewayProcess) -> socket.socket:
    """A connection with an endless answer and a small receive buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(gateway.url.rpartition(":")[2])))
    body = json.dumps(request(60, ignore_eos=True)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    return connection


def test_streams_that_nobody_reads_block_nobody() -> None:
    gateway = GatewayProcess({"tiny": roomy(options=["parallel:16"])})
    try:
        ask = {**request(9), "stream": False}
        assert gateway.client.post("/v1/chat/completions", json=ask).status_code == 200
        process = psutil.Process(gateway.child.pid)
        before = process.memory_info().rss
        slow = [begin(gateway) for _ in range(SLOW)]
        for _ in range(10):
            answer = gateway.client.post("/v1/chat/completions", json=ask).json()
            assert answer["choices"][0]["message"]["content"] == counted(9)
            slow[0].recv(1)
        assert process.memory_info().rss < before + MOST_GROWTH
        for connection in slow:
            connection.close()
        until_idle(gateway)
    finally:
        gateway.close()
