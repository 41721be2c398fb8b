"""Texts and tokens turned into each other for callers who want nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from backend.engine.errors import Overloaded

_MOST = 64

Given = TypeVar("Given")
Answer = TypeVar("Answer")


class TextCalls:
    """A thread of their own: callers who left must not hold up the prompts."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._running = 0

    async def run(self, work: Callable[[Given], Answer], given: Given) -> Answer:
        """What `work` makes of it. Raises Overloaded where too many wait, and what it raises."""
        if self._running >= _MOST:
            raise Overloaded(
                f"{self._running} texts are being tokenised or waiting: try again later"
            )
        self._running += 1
        future = asyncio.get_running_loop().run_in_executor(self._thread, work, given)
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def stop(self) -> None:
        """Begin nothing more. What runs ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._running -= 1
        if not future.cancelled():
            future.exception()  # its caller may have left
