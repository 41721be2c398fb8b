"""Counts the reasoning tokens of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from common.chat_events import ChatEvent, Reasoning


class ReasoningTokens:
    """A count that does not depend on how the answer was divided into Replies.

    A token that produces no event is markup, or its text is held back; it counts as the same kind
    as the text that follows.
    """

    def __init__(self) -> None:
        self.total = 0
        self._placed = 0

    def add(self, events: Sequence[ChatEvent], tokens: int) -> None:
        """Add the events that became known when the answer had `tokens` tokens."""
        if not events:
            return
        if any(isinstance(event, Reasoning) for event in events):
            self.total += tokens - self._placed
        self._placed = tokens
