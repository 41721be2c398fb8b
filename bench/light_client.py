"""A gRPC client for floods, which takes little time from the server that it measures.

gRPC's own client uses about as much processor time for a call as a server that refuses it. This one
writes each call to one connection as two HTTP/2 frames (RFC 9113) and only looks for the status in
the answer. Its thread reads answers while it waits for the time of the next call.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 0x1
_END_HEADERS = 0x4
_HEADER_BYTES = 9
_TABLE_SIZE, _INITIAL_WINDOW = 1, 4  # settings
_MOST = (1 << 31) - 1
_STATUS = b"\x0bgrpc-status"  # a name of 11 bytes that is not compressed
_READ_BYTES = 1 << 16
BROKEN = -1
"""Stands for the status of a call that ended without a status."""


class LightClient:
    """One connection.

    ended: called with the seconds that a call took, and its gRPC status code.
    """

    def __init__(self, port: int, method: str, ended: Callable[[float, int], None]) -> None:
        self.unanswered: dict[int, float] = {}
        self._ended = ended
        self._headers = b"".join(
            b"\0" + _literal(name) + _literal(value)
            for name, value in {
                ":method": "POST",
                ":scheme": "http",
                ":path": method,
                ":authority": "127.0.0.1",
                "content-type": "application/grpc",
                "te": "trailers",
            }.items()
        )
        self._stream = -1
        self._statuses: dict[int, int] = {}
        self._received = b""
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # With a dynamic table of size 0, the server does not compress the names of headers.
        settings = struct.pack(">HIHI", _TABLE_SIZE, 0, _INITIAL_WINDOW, _MOST)
        window = struct.pack(">I", _MOST - 0xFFFF)
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, settings) + _frame(_WINDOW, 0, window))

    def close(self) -> None:
        """Close the connection, which cancels the calls that are not answered yet."""
        self._socket.close()

    def call(self, message: bytes) -> None:
        """Send one request."""
        self._stream += 2
        self.unanswered[self._stream] = time.perf_counter()
        data = b"\0" + struct.pack(">I", len(message)) + message
        self._socket.sendall(
            _frame(_HEADERS, self._stream, self._headers, _END_HEADERS)
            + _frame(_DATA, self._stream, data, _END_STREAM)
        )

    def read_until(self, end: float) -> None:
        """Read answers until this time of `perf_counter`. Raises ConnectionError at their end."""
        while (left := end - time.perf_counter()) > 0:
            self._socket.settimeout(left)
            try:
                received = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                break
            if not received:
                raise ConnectionError("the server has closed the connection")
            self._take(received)
        self._socket.settimeout(None)

    def _take(self, received: bytes) -> None:
        data, at = self._received + received, 0
        while len(data) - at >= _HEADER_BYTES:
            end = at + _HEADER_BYTES + int.from_bytes(data[at : at + 3])
            if end > len(data):
                break
            kind, flags, stream = struct.unpack_from(">BBI", data, at + 3)
            self._frame(kind, flags, stream, data[at + _HEADER_BYTES : end])
            at = end
        self._received = data[at:]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _HEADERS and (at := payload.find(_STATUS)) >= 0:
            begin = at + len(_STATUS) + 1
            self._statuses[stream] = int(payload[begin : begin + payload[begin - 1]])
        if kind == _RESET or (kind in (_HEADERS, _DATA) and flags & _END_STREAM):
            code = self._statuses.pop(stream, BROKEN)
            if (started := self.unanswered.pop(stream, None)) is not None:
                self._ended(time.perf_counter() - started, code)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._socket.sendall(_frame(kind, 0, payload if kind == _PING else b"", _ACK))
        elif kind == _GOAWAY:
            raise ConnectionError(f"the server ends the connection: {payload[8:]!r}")


def _frame(kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(text: str) -> bytes:
    """Return a string of up to 126 bytes for an uncompressed header (RFC 7541, section 6.2.2)."""
    return bytes([len(text)]) + text.encode()
