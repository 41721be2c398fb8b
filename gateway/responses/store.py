"""Stored responses, to be continued or retrieved: in memory, and limited.

A stored response contains its complete conversation, so it can be continued after earlier ones were
removed. The least recently used ones are removed for new ones, and all expire; nothing outlives the
process.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from gateway.errors import ApiError, bad_field
from gateway.responses.items import ITEMS, Item, ItemReference, Reasoning, Sent

Json = dict[str, Any]
MOST = 1000  # responses
MOST_BYTES = 256 << 20  # of all conversations together


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, its input items, and the items of the responses before it."""

    response: Json
    earlier: tuple[Json, ...]
    given: tuple[Json, ...]

    def conversation(self) -> tuple[Json, ...]:
        """Every item up to and including this response's own."""
        return (*self.earlier, *self.given, *self.response["output"])


class Store:
    def __init__(
        self,
        seconds: float = 86_400.0,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds  # seconds after its last use; 0: none is stored
        self._most = most
        self._most_bytes = most_bytes
        self._clock = clock
        # The least recently used first, each with its size and the time of its last use.
        self._kept: OrderedDict[str, tuple[Stored, int, float]] = OrderedDict()
        self._holders: dict[str, dict[str, None]] = {}  # the responses that contain each item
        # By id, for an item that conversations share; clients may give others the same id.
        self._sizes: dict[str, tuple[Json, int]] = {}
        self._bytes = 0

    def put(self, stored: Stored) -> None:
        """Store it and remove others if there is no room; one that can never fit is not stored."""
        items = stored.conversation()
        sizes = list(map(self._size_of, items))
        size = sum(sizes)
        if size > self._most_bytes or not self._seconds:
            return
        name = stored.response["id"]
        self._kept[name] = (stored, size, self._clock())
        self._bytes += size
        for item, item_size in zip(items, sizes, strict=True):
            self._holders.setdefault(item["id"], {})[name] = None
            self._sizes[item["id"]] = item, item_size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def _size_of(self, item: Json) -> int:
        known, size = self._sizes.get(item["id"], (None, 0))
        return size if known is item else _size(item)

    def forget_old(self) -> None:
        """Remove responses that have not been used for too long."""
        oldest = self._clock() - self._seconds
        while self._kept and next(iter(self._kept.values()))[2] < oldest:
            self._drop(next(iter(self._kept)))

    def get(self, name: str, param: str) -> Stored:
        """The response. Raises ApiError 404 about `param` if it is not stored (any more)."""
        if name not in self._kept:
            raise _missing(name, param)
        stored, size, _ = self._kept.pop(name)
        self._kept[name] = (stored, size, self._clock())
        return stored

    def delete(self, name: str) -> None:
        """Remove a response. Raises ApiError 404 if it is not stored."""
        if name not in self._kept:
            raise _missing(name, "response_id")
        self._drop(name)

    def item(self, name: str, param: str) -> Json:
        """An input or output item of a stored response. Raises ApiError about `param`."""
        holders = self._holders.get(name)
        if holders is None:
            raise bad_field(
                param,
                f"there is no stored item {name[:64]!r}: items are kept with their responses, the "
                "latest of them, unless store is false; send the item itself instead",
                "item_not_found",
            )
        items = self.get(next(reversed(holders)), param).conversation()
        return next(item for item in items if item["id"] == name)

    def resolved(self, sent: Sequence[Sent]) -> list[Item]:
        """The input with the stored items for references. Raises ApiError for an unknown one.

        A reference is also reasoning of which a client kept only the id, as LangChain does.
        """
        return [self._known(item, f"input[{index}].id") for index, item in enumerate(sent)]

    def _known(self, item: Sent, place: str) -> Item:
        bare = isinstance(item, Reasoning) and not (item.content or item.encrypted_content)
        if isinstance(item, ItemReference) or (bare and item.id in self._holders):
            return ITEMS.validate_python([self.item(item.id or "", place)])[0]
        return item

    def _drop(self, name: str) -> None:
        stored, freed, _ = self._kept.pop(name)
        self._bytes -= freed
        for item in {item["id"] for item in stored.conversation()}:
            holders = self._holders[item]
            del holders[name]
            if not holders:
                del self._holders[item]
                del self._sizes[item]


def _size(value: Any) -> int:
    """The value's size in bytes. Nothing is serialised, because an item may be a very long text."""
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    return sys.getsizeof(value) + sum(map(_size, inner))


def _missing(name: str, param: str) -> ApiError:
    return ApiError(
        400 if param == "previous_response_id" else 404,
        f"there is no stored response {name[:64]!r}: only the latest are kept, in memory; send the "
        "complete conversation as input instead",
        code="previous_response_not_found" if param == "previous_response_id" else "not_found",
        param=param,
    )


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def as_stored(items: Sequence[Item]) -> tuple[Json, ...]:
    """The items as JSON."""
    ids = (f"{_PREFIXES[item.type]}_{uuid.uuid4().hex}" for item in items)
    fresh = ({"id": each, "status": "completed"} for each in ids)
    return tuple(new | _plain(item) for new, item in zip(fresh, items, strict=True))


def _plain(value: Any) -> Any:
    """Like `model_dump(exclude_none=True)`, which blocks streams while it copies long texts."""
    if isinstance(value, BaseModel):
        return {name: _plain(inner) for name, inner in value if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
