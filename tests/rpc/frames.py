"""HTTP/2 frames, for clients that behave as no library lets them."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING = 0, 1, 3, 4, 6
END_STREAM, END_HEADERS, CANCEL = 1, 4, 8
INITIAL_WINDOW = 4


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(content) << 8 | kind, flags, stream) + content


def setting(identifier: int, value: int) -> bytes:
    return struct.pack(">HI", identifier, value)


def head(path: str) -> bytes:
    """The headers of a call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(b"\0" + _literal(name) + _literal(value) for name, value in fields.items())


def message(content: bytes) -> bytes:
    """A message of a call, with its length before it."""
    return struct.pack(">BI", 0, len(content)) + content


def _literal(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()
