"""What the engine thread has for the owners of requests, until it is handed to the event loop.

A handover wakes the event loop, and a Reply costs more there than a token of a small model costs
the engine. So text waits for a moment, and the tokens of that moment go out together; what somebody
may be waiting for goes at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from backend.engine.embedding.encoding import Encoded
from backend.engine.errors import EngineError
from backend.engine.events import Event, TextDelta

PER_ANSWER = 1.25e-3  # seconds; a Reply takes 0.1 ms of the event loop, and so a tenth of its time

Publication: TypeAlias = tuple[int, Event | Encoded | EngineError]


class Outbox:
    """deliver: takes publications in their order. clock: seconds.

    interval: seconds for which text may wait after the latest handover, at least; with many
    answers it is PER_ANSWER for each of them, and 0 hands over every token by itself. The first
    text of an answer, its end and a failure do not wait, and take with them what does.
    """

    def __init__(
        self,
        deliver: Callable[[list[Publication]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deliver = deliver
        self._clock = clock
        self._waiting: list[Publication] = []
        self._begun: set[int] = set()  # answers that some text was published of
        self._urgent = False
        self._flushed_at = float("-inf")
        self.interval = 0.0

    def publish(self, ticket: int, what: Event | Encoded | EngineError) -> None:
        self._waiting.append((ticket, what))
        if not isinstance(what, TextDelta):
            self._begun.discard(ticket)
            self._urgent = True
        elif ticket not in self._begun:
            self._begun.add(ticket)
            self._urgent = True

    def cancelled(self, ticket: int) -> None:
        """Nothing more comes for this owner."""
        self._begun.discard(ticket)

    def flush(self, *, everything: bool = False) -> None:
        """Hand over what is due. everything: text too that could wait."""
        if not self._waiting:
            return
        now = self._clock()
        interval = self.interval and max(self.interval, PER_ANSWER * len(self._begun))
        if everything or self._urgent or now - self._flushed_at >= interval:
            publications, self._waiting = self._waiting, []
            self._urgent, self._flushed_at = False, now
            self._deliver(publications)
