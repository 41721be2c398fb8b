"""Stored responses, to be continued or retrieved: in memory, and limited.

A stored response contains its complete conversation, so it can be continued after earlier ones were
removed. If the store is full, the API key that uses most of it loses its least recently used
response. All responses expire, and none outlives the process. Requests with another API key do not
find a response.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from common.field_names import named
from common.wording import shown
from gateway import exchange
from gateway.errors import ApiError, bad_field
from gateway.responses.items import ITEMS, Item, ItemReference, Reasoning, Sent

Json = dict[str, Any]
MOST = 1000  # responses
MOST_BYTES = 256 << 20  # for all conversations together
_LATE = 1.0  # seconds that an expired response may stay, so that one timer removes several
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "additional_tools": "at",
    "compaction": "cmp",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, its input items, and the response that it continues."""

    response: Json
    earlier: tuple[Json, ...]  # the items of the responses before it
    given: tuple[Json, ...]
    named: frozenset[str] = frozenset()  # the ids in `given` that the gateway chose
    input_bytes: int = 0  # bytes of `earlier` and `given`
    owner: str = field(default_factory=lambda: exchange.current().owner)

    def conversation(self) -> tuple[Json, ...]:
        """Return all items, up to those of this response."""
        return (*self.earlier, *self.given, *self.response["output"])

    def named_here(self) -> list[Json]:
        """Return the items of this response whose ids the gateway chose.

        No other items have these ids.
        """
        given = (item for item in self.given if item["id"] in self.named)
        return [*given, *self.response["output"]]

    @property
    def size(self) -> int:
        """Bytes of the conversation."""
        return self.input_bytes + sum(map(_size, self.response["output"]))


class Store:
    """The stored responses of all API keys."""

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
        # The response of each item whose id the gateway chose. Clients may give the same id to
        # several items, so those that they named are found only in their own conversation.
        self._responses: dict[str, str] = {}
        self._bytes = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._parts: defaultdict[str, float] = defaultdict(float)  # parts of the limits, by owner

    def put(self, stored: Stored) -> None:
        """Store a response, and remove others to stay within the limits.

        A response that exceeds a limit by itself is not stored.
        """
        size = stored.size
        if size > self._most_bytes or not self._seconds:
            return
        name = stored.response["id"]
        self._kept[name] = (stored, size, self._clock())
        self._bytes += size
        self._parts[stored.owner] += self._part(size)
        self._responses |= {item["id"]: name for item in stored.named_here()}
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            owner = max(self._parts, key=lambda owner: self._parts[owner])
            self._drop(next(key for key, row in self._kept.items() if row[0].owner == owner))

    def _part(self, size: int) -> float:
        """Return which part of the limits a response of `size` bytes uses."""
        return size / self._most_bytes + 1 / self._most

    def forget_old(self) -> None:
        oldest = self._clock() - self._seconds
        while self._kept and next(iter(self._kept.values()))[2] < oldest:
            self._drop(next(iter(self._kept)))

    def expire_later(self) -> None:
        """Remove each response when its time is over, even if no request arrives then."""
        if self._expiry is None and self._kept:
            oldest = next(iter(self._kept.values()))[2]
            left = max(oldest + self._seconds - self._clock(), 0.0) + _LATE
            self._expiry = asyncio.get_running_loop().call_later(left, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self.forget_old()
        self.expire_later()

    def get(self, name: str, param: str) -> Stored:
        """Return the response.

        Raises ApiError 404 about `param` if this client has none of that name.
        """
        stored, size, _ = self._kept.get(name, (None, 0, 0.0))
        if stored is None or stored.owner != exchange.current().owner:
            continues = param == "previous_response_id"
            raise ApiError(
                400 if continues else 404,
                f"there is no stored response {shown(name)}: only the latest are stored, in memory;"
                " send the complete conversation as input instead",
                code="previous_response_not_found" if continues else "not_found",
                param=param,
            )
        self._kept[name] = (stored, size, self._clock())
        self._kept.move_to_end(name)
        return stored

    def delete(self, name: str) -> None:
        """Remove a response. Raises ApiError 404 as `get` does."""
        self.get(name, "response_id")
        self._drop(name)

    def resolved(self, sent: Sequence[Sent], previous: Stored | None = None) -> list[Item | Json]:
        """Return the input with the stored items for references; `items_of` validates them.

        Raises ApiError for a reference to an unknown item, and for two to the same item.

        An item is found in the conversation of `previous`, and in this client's other responses if
        the gateway chose its id. Reasoning without content is a reference too: LangChain sends only
        its id.
        """
        known = {item["id"]: item for item in previous.conversation()} if previous else {}
        found: dict[str, Json] = {}
        items: list[Item | Json] = []
        for at, item in enumerate(sent):
            stored = self._known(item, f"input[{at}].id", known)
            if stored is None:
                assert not isinstance(item, ItemReference)
                items.append(item)
            elif stored["id"] in found:
                raise bad_field(
                    f"{named('input')} refers to the same item more than once: send each reference"
                    " once",
                    "duplicate_item",
                )
            else:
                items.append(stored)
                found[stored["id"]] = stored
        if found:
            exchange.current().long = True  # a short reference may stand for a long item
        return items

    def _known(self, item: Sent, place: str, known: Mapping[str, Json]) -> Json | None:
        """Return the stored item for a reference; None for any other item."""
        bare = isinstance(item, Reasoning) and not (item.content or item.encrypted_content)
        if not isinstance(item, ItemReference) and not (bare and item.id):
            return None
        try:
            return known.get(item.id or "") or self._item(item.id or "", place)
        except ApiError:
            if isinstance(item, ItemReference):
                raise
            return None

    def _item(self, name: str, param: str) -> Json:
        """Return an item of any of this client's responses. Raises ApiError about `param`."""
        try:
            items = self.get(self._responses.get(name, ""), param).named_here()
        except ApiError:
            message = (
                f"there is no stored item {shown(name)}: items are stored with their responses,"
                " unless store is false, and those with an id of your own are found only with"
                " previous_response_id; send the item itself instead"
            )
            raise bad_field(message, "item_not_found", param=param) from None
        return next(item for item in items if item["id"] == name)

    def _drop(self, name: str) -> None:
        stored, freed, _ = self._kept.pop(name)
        self._bytes -= freed
        self._parts[stored.owner] -= self._part(freed)
        for item in stored.named_here():
            self._responses.pop(item["id"], None)


def _size(value: Any) -> int:
    """Return the value's size in bytes.

    Nothing is serialised, because an item may be a very long text.
    """
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    return sys.getsizeof(value) + sum(map(_size, inner))


def items_of(resolved: Sequence[Item | Json]) -> list[Item]:
    """Return the input with its stored items validated, which may take long."""
    return [ITEMS.validate_python([e])[0] if isinstance(e, dict) else e for e in resolved]


def as_stored(given: Sequence[Item], previous: Stored | None) -> Stored:
    """Return what to store for an input that continues `previous`; the response is added later.

    Items without an id get a new id.
    """
    named = [f"{_PREFIXES[item.type]}_{uuid.uuid4().hex}" for item in given]
    items = [
        {"id": name, "status": "completed"} | _plain(item)
        for name, item in zip(named, given, strict=True)
    ]
    earlier, before = (previous.conversation(), previous.size) if previous else ((), 0)
    input_bytes = before + sum(map(_size, items))
    return Stored({}, earlier, tuple(items), frozenset(named), input_bytes)


def _plain(value: Any) -> Any:
    """Do what `model_dump(exclude_none=True)` does, but without copies of long texts."""
    if isinstance(value, BaseModel):
        return {name: _plain(inner) for name, inner in value if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
