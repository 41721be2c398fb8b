"""Limits the sizes of requests before they are parsed, and the number of calls without one.

Parsing and validating a message blocks every other call, and a few bytes can become a thousand
times as much memory, because each empty message in a list is an object. So a request of more than
`_FREE` bytes is first scanned field by field, by tags and lengths
(https://protobuf.dev/programming-guides/encoding/), which takes almost no time.

A call whose client does not send its request occupies some 20 KiB, and clients may have any number
of connections.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from functools import cache
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor

from backend.engine.errors import InvalidRequest
from backend.engine.units import MIB

_FREE = 1 << 16
MOST_ENTRIES = 20_000
_USUAL = 1 << 18
_LARGER = {
    "EmbeddingTokens": 8 * MIB,
    "Grammar": MIB,
    "LogitBias": MIB,
    "Metadata": 8 * MIB,
    "StopPrompts": MIB,
    "Tools": 8 * MIB,
}
# Fields that are limited only by the message size: the right limit depends on the model.
_WHOLE = frozenset(
    {
        "Audios", "Embeddings", "Images", "Messages", "Prompt", "Videos",
        "candidates", "documents", "dst", "prompt", "query", "text", "tokens",
    }
)  # fmt: skip
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
MOST = 4096  # four times as many as LocalAI has calls
SECONDS = 600.0  # a large request may arrive over a slow network


def require_bounded(message: type[Any], raw: bytes) -> None:
    """Raise InvalidRequest if a field is too large, or if there are too many.

    message: the generated class for `raw`.
    """
    if len(raw) <= _FREE:
        return
    most = _most_bytes(message.DESCRIPTOR)
    sizes: Counter[int] = Counter()
    at = entries = 0
    try:
        while at < len(raw):
            entries += 1
            if entries > MOST_ENTRIES:
                raise InvalidRequest(
                    f"the request has more than {MOST_ENTRIES} fields and list entries: send fewer"
                )
            tag, at = _varint(raw, at)
            number, form = tag >> 3, tag & 7
            if form == _BYTES:
                length, at = _varint(raw, at)
                at += length
                sizes[number] += length
            elif form == _VARINT:
                _, at = _varint(raw, at)
            elif form in (_FIXED32, _FIXED64):
                at += 4 if form == _FIXED32 else 8
            else:
                return  # not a valid message; the parser will report it
    except IndexError:
        return
    for number, size in sizes.items():
        name, bound = most.get(number, ("an unknown field", _USUAL))
        if bound is not None and size > bound:
            raise InvalidRequest(f"{name} is {size} bytes long: send at most {bound}")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset after it."""
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


@cache
def _most_bytes(message: Descriptor) -> dict[int, tuple[str, int | None]]:
    return {
        field.number: (
            field.name,
            None if field.name in _WHOLE else _LARGER.get(field.name, _USUAL),
        )
        for field in message.fields
    }


class UnsentRequests:
    """The calls of a server whose request has not arrived yet, the oldest first."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[asyncio.Timeout, None] = OrderedDict()

    async def read(self, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Return a call's first message, or EOF. Raises InvalidRequest if neither arrives in time.

        The time is SECONDS; if more than MOST calls wait, the oldest of them ends at once.
        """
        limit = asyncio.timeout(SECONDS)
        try:
            async with limit:
                self._waiting[limit] = None
                if len(self._waiting) > MOST:
                    oldest, _ = self._waiting.popitem(last=False)
                    oldest.reschedule(0)
                return await context.read()
        except TimeoutError:
            raise InvalidRequest("the call's request did not arrive: send one message") from None
        finally:
            self._waiting.pop(limit, None)
