"""Runs work on threads that would hold the event loop for too long."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from gateway import exchange

_THREADS = ThreadPoolExecutor(2, "bodies")  # few, because they take turns with the event loop
T = TypeVar("T")


async def offload(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of `work`, which runs on a thread if the body is long.

    Checking many small values takes a second, in which streams and other requests must continue.
    """
    return await on_thread(work, *arguments) if exchange.current().long else work(*arguments)


async def on_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of `work`, which runs on a thread, for the same request."""
    run = functools.partial(copy_context().run, work, *arguments)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, run)
