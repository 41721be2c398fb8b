"""Calls of a backend that answer once: with a time limit, and a failure as a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from gateway.errors import AS_ON_THE_WIRE, Names
from gateway.rpc_failures import as_refusals

Reply = TypeVar("Reply")
_AT_ONCE = 32  # of one request; the backend's queue is for everybody


async def ask(
    method: Callable[..., Awaitable[Reply]],
    request: Any,
    seconds: float,
    names: Names = AS_ON_THE_WIRE,
) -> Reply:
    """The reply of one call (`seconds` 0: no limit); cancelled with its task.

    names: what the client calls the fields of the wire. Raises ApiError in those words.
    """
    with as_refusals(names):
        return await method(request, timeout=seconds or None)


async def ask_all(
    method: Callable[..., Awaitable[Reply]],
    requests: Sequence[Any],
    seconds: float,
    names: Callable[[int], Names] = lambda _: AS_ON_THE_WIRE,
) -> list[Reply]:
    """The replies in the order of the requests. The first failure cancels the rest.

    names: as for `ask`, for the request of each index.
    """
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(index: int) -> Reply:
        async with places:
            return await ask(method, requests[index], seconds, names(index))

    tasks = [asyncio.ensure_future(one(index)) for index in range(len(requests))]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
