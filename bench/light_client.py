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

from tests.rpc import frames

_GOAWAY, _WINDOW = 7, 8
_ACK = 0x1
_HEADER_BYTES = 9
_TABLE_SIZE = 1  # the setting SETTINGS_HEADER_TABLE_SIZE
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
        self._headers = frames.head(method)
        self._stream = -1
        self._statuses: dict[int, int] = {}
        self._received = b""
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # With a dynamic table of size 0, the server does not compress the names of headers.
        settings = frames.setting(_TABLE_SIZE, 0) + frames.setting(frames.INITIAL_WINDOW, _MOST)
        window = struct.pack(">I", _MOST - 0xFFFF)
        self._socket.sendall(
            frames.PREFACE
            + frames.frame(frames.SETTINGS, 0, 0, settings)
            + frames.frame(_WINDOW, 0, 0, window)
        )

    def close(self) -> None:
        """Close the connection, which cancels the calls that are not answered yet."""
        self._socket.close()

    def call(self, message: bytes) -> None:
        """Send one request."""
        self._stream += 2
        self.unanswered[self._stream] = time.perf_counter()
        self._socket.sendall(
            frames.frame(frames.HEADERS, frames.END_HEADERS, self._stream, self._headers)
            + frames.frame(frames.DATA, frames.END_STREAM, self._stream, frames.message(message))
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
        if kind == frames.HEADERS and (at := payload.find(_STATUS)) >= 0:
            begin = at + len(_STATUS) + 1
            self._statuses[stream] = int(payload[begin : begin + payload[begin - 1]])
        ends = kind in (frames.HEADERS, frames.DATA) and flags & frames.END_STREAM
        if kind == frames.RESET or ends:
            code = self._statuses.pop(stream, BROKEN)
            if (started := self.unanswered.pop(stream, None)) is not None:
                self._ended(time.perf_counter() - started, code)
        elif kind in (frames.SETTINGS, frames.PING) and not flags & _ACK:
            answer = payload if kind == frames.PING else b""
            self._socket.sendall(frames.frame(kind, _ACK, 0, answer))
        elif kind == _GOAWAY:
            raise ConnectionError(f"the server ends the connection: {payload[8:]!r}")
