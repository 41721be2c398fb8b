"""Calls of a backend that answer once: with a time limit, and a failure as a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from gateway import errors

Reply = TypeVar("Reply")
_AT_ONCE = 32  # of one request; the backend's queue is for everybody


async def ask(method: Callable[..., Awaitable[Reply]], request: Any, seconds: float) -> Reply:
    """The reply of one call (`seconds` 0: no limit). Raises ApiError; cancelled with its task."""
    try:
        return await method(request, timeout=seconds or None)
    except grpc.aio.AioRpcError as error:
        raise errors.of_rpc(error) from None


async def ask_all(
    method: Callable[..., Awaitable[Reply]], requests: Sequence[Any], seconds: float
) -> list[Reply]:
    """The replies in the order of the requests. The first failure cancels the rest."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(request: Any) -> Reply:
        async with places:
            return await ask(method, request, seconds)

    tasks = [asyncio.ensure_future(one(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
