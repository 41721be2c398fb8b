"""Returns the memory of long requests, which glibc would keep, to the system."""

from __future__ import annotations

import asyncio

from common.machine_memory import return_freed_memory

LONG = 1 << 20  # bytes
_SOON = 0.05  # seconds for gRPC to release the request


def return_memory_soon() -> None:
    """Return the memory of the current call, shortly after gRPC has released the request."""
    asyncio.get_running_loop().call_later(_SOON, _return_memory)


def _return_memory() -> None:
    """Return freed memory, on a thread because it takes time."""
    asyncio.get_running_loop().run_in_executor(None, return_freed_memory)
