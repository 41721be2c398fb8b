"""Runs TokenizeString and Detokenize calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from backend.engine.errors import Overloaded
from backend.engine.threads import reserved_threads

_MOST = 64

Given = TypeVar("Given")
Answer = TypeVar("Answer")


class TextCalls:
    """Runs the calls on a thread of their own, so that cancelled ones do not delay prompts."""

    def __init__(self) -> None:
        self._thread = reserved_threads(1, "text")
        self._running = 0

    async def run(self, work: Callable[[Given], Answer], given: Given) -> Answer:
        """Run `work(given)`. Raises what it raises, and Overloaded if too many are waiting."""
        if self._running >= _MOST:
            raise Overloaded(
                f"{self._running} texts are being tokenised or waiting: try again later"
            )
        self._running += 1
        future = asyncio.get_running_loop().run_in_executor(self._thread, work, given)
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def stop(self) -> None:
        """Start no more work. Running work ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._running -= 1
        if not future.cancelled():
            future.exception()  # if the caller was cancelled, nobody else retrieves it
