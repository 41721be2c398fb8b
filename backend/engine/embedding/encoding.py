"""The data that event loop and engine thread exchange for Embedding, Rerank and TokenClassify.

This module imports only the standard library, so the event loop needs neither NumPy nor MLX.
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
    """One row for the model: token ids, and segment ids if the model distinguishes two segments.

    cut: tokens of the input that were left out because the model reads no more. unpooled: number of
    tokens at the beginning, a prompt's, that are not pooled.
    """

    ids: list[int]
    segments: list[int] = field(default_factory=list)
    cut: int = 0
    unpooled: int = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """The model's float32 output for each piece of a request, in the order of the pieces.

    Depending on the model: a vector (dim,), token vectors (tokens, dim), one score (), or label
    probabilities (tokens, labels). For a recording: its samples.
    """

    outputs: tuple[np.ndarray, ...]


class Encoding:
    """The event loop's handle for one submitted request. `over`: whether it has been answered."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._answer: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        return self._answer.done()

    def push(self, what: Event | Encoded | EngineError) -> None:
        """Set the answer. Called on the event loop."""
        if self.over:
            return
        if isinstance(what, Encoded):
            self._answer.set_result(what)
        elif isinstance(what, EngineError):
            self._answer.set_exception(what)

    def cancel(self) -> None:
        """Cancel the request; a caller that still waits for the result gets Cancelled."""
        if not self.over:
            self.push(Cancelled("the request was cancelled"))
            self._cancel()

    async def result(self) -> Encoded:
        """Wait for the answer. Raises EngineError. A cancelled caller cancels the request."""
        try:
            return await asyncio.shield(self._answer)
        except asyncio.CancelledError:
            self.cancel()
            self._answer.exception()
            raise
