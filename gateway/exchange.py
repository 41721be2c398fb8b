"""The running requests, each with its answer, for the log and the metrics.

The outermost middleware creates an Exchange, and every layer below records what it learns in
`current()`, because tokens are counted far from the layer that writes the log line.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

MOST_IGNORED = 24  # names that the header and the log line list
LONGEST_NAME = 80  # characters: with MOST_IGNORED, at most 2 KiB in a header
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.\-\[\]]")
_INDEX = re.compile(r"\[[0-9]+\]")
CLIENT_LEFT = 499  # nginx's number, only for the log and the metrics
_current: ContextVar[Exchange] = ContextVar("exchange")


@dataclass(slots=True)
class Exchange:
    """A request and its answer."""

    request_id: str
    method: str
    path: str  # the path that was requested
    started: float = field(default_factory=time.monotonic)
    route: str = ""  # the declared path of the route; "" until one was found
    model: str = ""  # as requested, shortened; text from a client
    key: str = ""  # the name of the API key, if it has one
    owner: str = ""  # who owns what the request stores: a key or a name
    long: bool = False  # whether its body takes long to check and to translate
    status: int = 0  # 0 until the answer has begun
    streams: bool = False
    waits: asyncio.Event = field(default_factory=asyncio.Event)  # set while its model is loaded
    first_byte: float | None = None  # seconds after the start
    broken: str = ""  # the code of the error that a stream ended with
    left: bool = False  # the client disconnected before the answer was complete
    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncated: int = 0  # tokens of texts to embed or rank that the model left out
    strict: bool = False  # whether fields without meaning are refused
    ignored: dict[str, None] = field(default_factory=dict)  # fields that were left out, in order
    name_of: Callable[[str], str] = str  # returns the client's name for a path in a translated body

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def ignore(self, place: str) -> None:
        """Record a field that was left out: its path in the body, whose indices are not listed."""
        if len(self.ignored) < MOST_IGNORED:
            name = _INDEX.sub("[]", self.name_of(place))
            # It may be a client's text.
            self.ignored[_NOT_PLAIN.sub("?", name)[:LONGEST_NAME]] = None

    def count_tokens(self, prompt: int, completion: int) -> None:
        self.prompt_tokens += prompt
        self.completion_tokens += completion


def begin(exchange: Exchange) -> None:
    """Set the request for which this task, and the tasks it starts, work."""
    _current.set(exchange)


def current() -> Exchange:
    """Return the request that this task serves; elsewhere, a new object that nobody reads."""
    return _current.get(None) or Exchange("", "", "")


class Traffic:
    """The requests of one gateway that have begun and not ended."""

    def __init__(self) -> None:
        self._running: dict[int, Exchange] = {}  # by identity
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def long(self) -> bool:
        """Whether a request with a long body is running."""
        return any(each.long for each in self._running.values())

    @contextmanager
    def request(self, exchange: Exchange) -> Iterator[None]:
        """Record that a request runs during the block."""
        self._running[id(exchange)] = exchange
        self._idle.clear()
        try:
            yield
        finally:
            del self._running[id(exchange)]
            if not self._running:
                self._idle.set()

    async def drain(self, patience: float) -> bool:
        """Accept no more requests.

        Returns whether all running ones end within `patience` seconds.
        """
        self.draining = True
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
