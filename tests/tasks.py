"""Tasks of the event loop under test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def begun(work: Awaitable[T]) -> asyncio.Task[T]:
    """A task of the work that has come to its first wait, or its end."""
    started = asyncio.Event()

    async def run() -> T:
        started.set()
        return await work

    task = asyncio.create_task(run())
    await started.wait()
    return task
