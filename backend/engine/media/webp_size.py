"""The size of a WebP image, from its header.

Pillow's WebP reader takes memory for the whole canvas as soon as the file is opened, which is
before a bound on pixels could be checked against it. The layouts are those of RFC 9649.
"""

from __future__ import annotations


def webp_size(content: bytes) -> tuple[int, int] | None:
    """Width and height in pixels, or None where the header says neither."""
    chunk, data = content[12:16], content[20:30]
    if len(data) < 10:
        return None
    if chunk == b"VP8X":
        return _number(data[4:7]) + 1, _number(data[7:10]) + 1
    if chunk == b"VP8L" and data[0] == 0x2F:
        bits = _number(data[1:5])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 " and data[3:6] == b"\x9d\x01\x2a":
        return _number(data[6:8]) & 0x3FFF, _number(data[8:10]) & 0x3FFF
    return None


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")
