"""Collects events on the engine thread until they are delivered to the event loop.

Each delivery wakes the event loop, which needs more time for a Reply than the engine for a token of
a small model. So text is collected for a short interval and sent together. The events that users
notice (first text, end, error) are delivered immediately.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from backend.engine.embedding.encoding import Encoded
from backend.engine.errors import EngineError
from backend.engine.events import Event, GrowingText, Undelivered

PER_ANSWER = 6e-3  # seconds; the event loop and the host need about 0.1 ms each for a Reply
FOR_ALL = 0.1  # seconds; a reader would notice a longer interval

Publication: TypeAlias = tuple[int, Event | Encoded | EngineError]


class Outbox:
    """Events that have not been delivered yet.

    The first text of an answer, its end and an error are delivered immediately, together with any
    text that is waiting. Text can grow until it is delivered.
    deliver: called with publications, in order.
    clock: returns seconds.
    interval: seconds for which text may be collected; 0 delivers every token separately. While many
        answers run, it is at least PER_ANSWER for each of them, up to FOR_ALL.
    """

    def __init__(
        self,
        deliver: Callable[[list[Publication]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deliver = deliver
        self._clock = clock
        self._waiting: list[tuple[int, Undelivered | EngineError]] = []
        self._begun: set[int] = set()  # tickets whose first text was published
        self._urgent = False
        self._flushed_at = float("-inf")
        self.interval = 0.0

    def publish(self, ticket: int, what: Undelivered | EngineError) -> None:
        self._waiting.append((ticket, what))
        if not isinstance(what, GrowingText):
            self._begun.discard(ticket)
            self._urgent = True
        elif ticket not in self._begun:
            self._begun.add(ticket)
            self._urgent = True

    def cancelled(self, ticket: int) -> None:
        """Record that no more events will come for this ticket."""
        self._begun.discard(ticket)

    def flush(self, *, everything: bool = False, until_next: float = 0.0) -> None:
        """Deliver the events that are due.

        everything: whether to deliver also text that could wait.
        until_next: expected seconds until the next call that could deliver the text. Text is due
            now if it would then have been collected for longer than the interval: without this, a
            step that is slightly shorter than the interval would double the time between tokens.
        """
        if not self._waiting:
            return
        now = self._clock()
        if self.interval and not (everything or self._urgent):
            collected = now + until_next - self._flushed_at
            if collected < self.interval:
                return
            if collected < min(PER_ANSWER * len(self._begun), FOR_ALL):
                return
        waiting, self._waiting = self._waiting, []
        self._urgent, self._flushed_at = False, now
        self._deliver(
            [
                (ticket, what.close() if isinstance(what, GrowingText) else what)
                for ticket, what in waiting
            ]
        )
