"""A leased model asked, once more where its backend proves to be lost before it said anything.

Between the death of a process and the news of it lie milliseconds in which a request may still be
sent there; and a backend at an address may have been restarted, or freed, by its owner. The
request has done nothing yet, so it is sent again; the backend is doubted then, and the supervisor
looks at it before it lends it a second time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TypeVar

from gateway.errors import BACKEND_GONE, NOT_LOADED, ApiError
from gateway.supervisor.supervisor import Lease

_LOST = (BACKEND_GONE, NOT_LOADED)
Said = TypeVar("Said")
Reply = TypeVar("Reply")


async def ask(
    lend: Callable[[], AbstractAsyncContextManager[Lease]],
    send: Callable[[Lease], AsyncGenerator[Said, None]],
) -> AsyncGenerator[Said, None]:
    """What `send` says to a lease of `lend`, which is held until the last of it.

    Raises ApiError.
    """
    silent = True
    try:
        async with aclosing(_once(lend, send)) as first:
            async for event in first:
                silent = False
                yield event
    except ApiError as error:
        if not silent or error.code not in _LOST:
            raise
    else:
        return
    async with aclosing(_once(lend, send)) as second:
        async for event in second:
            yield event


async def ask_once(
    lend: Callable[[], AbstractAsyncContextManager[Lease]],
    work: Callable[[Lease], Awaitable[Reply]],
) -> Reply:
    """What `work` gets from a lease of `lend`. It only looks, so it may be done twice.

    Raises ApiError.
    """
    try:
        async with _lent(lend) as lease:
            return await work(lease)
    except ApiError as error:
        if error.code not in _LOST:
            raise
    async with lend() as lease:
        return await work(lease)


async def _once(
    lend: Callable[[], AbstractAsyncContextManager[Lease]],
    send: Callable[[Lease], AsyncGenerator[Said, None]],
) -> AsyncGenerator[Said, None]:
    async with _lent(lend) as lease, aclosing(send(lease)) as sayings:
        async for event in sayings:
            yield event


@asynccontextmanager
async def _lent(lend: Callable[[], AbstractAsyncContextManager[Lease]]) -> AsyncIterator[Lease]:
    """A lease whose backend is doubted where it, or its model, is gone."""
    async with lend() as lease:
        try:
            yield lease
        except ApiError as error:
            if error.code in _LOST:
                lease.doubt(error.code == NOT_LOADED)
            raise
