"""The event loop's handle for one submitted generation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TypeVar, cast

from backend.engine.embedding.encoding import Encoded
from backend.engine.errors import Cancelled, EngineError
from backend.engine.events import Event, Finished, TextDelta

Last = TypeVar("Last", Finished, Encoded)


class Generation:
    """An async iterator of a request's events, and the way to cancel it.

    Use as `async with engine.submit(request) as generation: async for event in generation: …`;
    leaving the block cancels a request that is still running. Iteration raises `EngineError` if the
    request fails. The last event of a successful request is `Finished` or `Encoded`. A slow reader
    gets several pieces of text as one, so the events that wait need no more memory than the text.
    over: whether the last event has arrived.
    prompt_tail: the end of the rendered prompt, set before the first event arrives.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._events: deque[Event | Encoded | EngineError] = deque()
        self._arrived = asyncio.Event()
        self.over = False
        self.prompt_tail = ""

    def push(self, event: Event | Encoded | EngineError) -> None:
        """Add an event; events after the end are dropped. Called on the event loop."""
        if self.over:
            return
        self.over = isinstance(event, Finished | Encoded | EngineError)
        self._events.append(event)
        self._arrived.set()

    def cancel(self) -> None:
        """Cancel the request: its slot is free within one step, and a reader gets Cancelled."""
        if not self.over:
            self.push(Cancelled("the request was cancelled"))
            self._cancel()

    async def last(self, kind: type[Last]) -> Last:
        """Wait for the last event. Raises EngineError. A cancelled caller cancels the request."""
        async with self:
            async for event in self._received():
                if isinstance(event, kind):
                    return event
        raise AssertionError("a request ends with such an event, or raises")

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __aiter__(self) -> AsyncIterator[Event]:
        return cast(AsyncIterator[Event], self._received())  # only `last` gets Encoded

    async def _received(self) -> AsyncIterator[Event | Encoded]:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._events:
                event = self._next()
                if isinstance(event, EngineError):
                    raise event
                yield event
                if self.over and not self._events:
                    return

    def _next(self) -> Event | Encoded | EngineError:
        event = self._events.popleft()
        if not isinstance(event, TextDelta):
            return event
        if not (self._events and isinstance(self._events[0], TextDelta)):
            return event
        joined, logprobs = [*event.pieces], [*event.logprobs]
        while self._events and isinstance(following := self._events[0], TextDelta):
            joined += following.pieces
            logprobs += following.logprobs
            event = following
            self._events.popleft()
        return TextDelta.joining(joined, event.usage, logprobs)
