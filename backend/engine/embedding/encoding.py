"""What the event loop and the engine thread exchange for Embedding, Rerank and TokenClassify.

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
    """One row for the model: token ids, and segment ids if the model distinguishes two segments."""

    ids: list[int]
    segments: list[int] = field(default_factory=list)
    cut: int = 0  # number of tokens that were left out because the input is too long
    # Number of tokens at the beginning that are not pooled, because they are a prompt.
    unpooled: int = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """The model's float32 output for each piece of a request, in the order of the pieces.

    An output is, depending on the model: a vector (dim,), token vectors (tokens, dim), a score (),
    or label probabilities (tokens, labels). For a recording, the output is its samples.
    """

    outputs: tuple[np.ndarray, ...]


class Encoding:
    """The event loop's handle for a submitted request.

    over: whether the request has been answered.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._answer: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        return self._answer.done()

    def push(self, answer: Event | Encoded | EngineError) -> None:
        """Set the answer. Called on the event loop."""
        if self.over:
            return
        if isinstance(answer, Encoded):
            self._answer.set_result(answer)
        elif isinstance(answer, EngineError):
            self._answer.set_exception(answer)

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
