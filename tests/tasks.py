"""Tasks of the event loop under test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def begun(work: Awaitable[T]) -> asyncio.Task[T]:
    """A task for the work, which has already run to its first `await` or to its end."""
    started = asyncio.Event()

    async def run() -> T:
        started.set()
        return await work

    task = asyncio.create_task(run())
    await started.wait()
    return task
