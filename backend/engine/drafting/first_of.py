"""Several drafters for one row: the first that has a guess makes it."""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.drafting.drafter import Drafter


class FirstOf:
    """A `Drafter` that asks others in their order, the cheapest first."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self._asked: Drafter | None = None

    def ready(self, length: int) -> bool:
        return any(drafter.ready(length) for drafter in self._drafters)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        for drafter in self._drafters:
            if guesses := drafter.propose(tokens, most):
                self._asked = drafter
                return guesses
        return []

    def told(self, proposed: int, accepted: int) -> None:
        if self._asked is not None:
            self._asked.told(proposed, accepted)

    def forget(self) -> None:
        self._asked = None
        for drafter in self._drafters:
            drafter.forget()
