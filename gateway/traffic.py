"""Counts running requests, and refuses new ones during shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Traffic:
    """The requests of one gateway that have begun and not ended."""

    def __init__(self) -> None:
        self.running = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request for the duration of the block."""
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def drain(self, patience: float) -> bool:
        """Accept no more requests.

        Returns whether all running ones end within `patience` seconds.
        """
        self.draining = True
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
