"""How many tokens of an answer were reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from common.chat_events import ChatEvent, Reasoning


class ReasoningTokens:
    """A count that does not depend on how the answer was cut into Replies.

    A token that shows nothing is markup, or held back until more is known: it counts with the text
    that comes next.
    """

    def __init__(self) -> None:
        self.total = 0
        self._placed = 0

    def add(self, events: Sequence[ChatEvent], tokens: int) -> None:
        """What became certain when the answer had `tokens` tokens."""
        if not events:
            return
        if any(isinstance(event, Reasoning) for event in events):
            self.total += tokens - self._placed
        self._placed = tokens
