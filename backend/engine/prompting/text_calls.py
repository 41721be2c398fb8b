"""Runs calls of TokenizeString and Detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from backend.engine.errors import Overloaded, ShuttingDown
from backend.engine.threads import reserved_threads

_MOST = 64

Given = TypeVar("Given")
Answer = TypeVar("Answer")


class TextCalls:
    """Runs the calls on a separate thread, so that cancelled calls do not delay prompts."""

    def __init__(self) -> None:
        self._thread = reserved_threads(1, "text")
        self._running = 0
        self._awaited: set[asyncio.Future[Any]] = set()
        self._stopping = False

    async def run(self, work: Callable[[Given], Answer], given: Given) -> Answer:
        """Return `work(given)`.

        Raises what `work` raises, Overloaded if too many calls are waiting, and ShuttingDown.
        """
        if self._running >= _MOST:
            raise Overloaded(
                f"{self._running} texts are being tokenised or waiting: try again later"
            )
        self._running += 1
        future = asyncio.get_running_loop().run_in_executor(self._thread, work, given)
        future.add_done_callback(self._done)
        answer = asyncio.shield(future)
        self._awaited.add(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stopping and task is not None and not task.cancelling():
                raise ShuttingDown from None
            raise
        finally:
            self._awaited.discard(answer)

    def stop(self) -> None:
        """Refuse waiting and later calls. Running work is not interrupted."""
        self._stopping = True
        for answer in self._awaited:
            answer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._running -= 1
        if not future.cancelled():
            future.exception()  # if the caller was cancelled, nobody else retrieves it
