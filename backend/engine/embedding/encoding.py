"""What travels between the event loop and the engine thread when a text becomes numbers.

Stdlib only: the event loop's side needs neither NumPy nor MLX to hold these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.engine.errors import Cancelled, EngineError
from backend.engine.events import Event

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Piece:
    """One row for the model: token ids, and their segments where the model tells two apart."""

    ids: list[int]
    segments: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The model's float32 output for each piece of a request, in the order of the pieces.

    A vector of (dim,), token vectors of (tokens, dim), one score of (), or probabilities of
    labels, (tokens, labels): that depends on the model.
    """

    outputs: tuple[np.ndarray, ...]


class Encoding:
    """One submitted request as its owner on the event loop sees it. `over`: it has an answer."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._answer: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        return self._answer.done()

    def push(self, what: Event | Encoded | EngineError) -> None:
        """Take the answer. Called on the event loop."""
        if self.over:
            return
        if isinstance(what, Encoded):
            self._answer.set_result(what)
        elif isinstance(what, EngineError):
            self._answer.set_exception(what)

    def cancel(self) -> None:
        """Take the request out wherever it is; a reader that still waits gets Cancelled."""
        if not self.over:
            self.push(Cancelled("the request was cancelled"))
            self._cancel()

    async def result(self) -> Encoded:
        """The answer. Raises EngineError. A caller that leaves cancels the request."""
        try:
            return await asyncio.shield(self._answer)
        except asyncio.CancelledError:
            self.cancel()
            self._answer.exception()
            raise
