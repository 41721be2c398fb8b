"""Sends a request to a leased model, and once more if its backend was lost before it arrived.

A request may be sent to a process in the milliseconds before its end is noticed, or to a backend at
an address that has been restarted or freed meanwhile. Such a request is sent again, after the
supervisor has checked the backend.

A prompt may also crash a backend, which ends all its answers. So a request that a backend had begun
to process is not sent again, and one that may have been running when two backends died is refused
for a while.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TypeVar

from pydantic import BaseModel

from gateway.errors import BACKEND_GONE, NOT_LOADED, SERVER, ApiError, without_folders
from gateway.supervisor.supervisor import Lease

_LOST = (BACKEND_GONE, NOT_LOADED)
_DEATHS = 2
_REMEMBERED = 600.0  # seconds
Lend = Callable[[], AbstractAsyncContextManager[Lease]]
Piece = TypeVar("Piece")
Reply = TypeVar("Reply")


async def ask(
    lend: Lend, send: Callable[[Lease], AsyncGenerator[Piece, None]], request: BaseModel
) -> AsyncGenerator[Piece, None]:
    """Yield the events of `send`, with a lease from `lend` that is released at the end.

    request: identifies the request, for `Suspects`.

    Raises ApiError.
    """
    silent = True
    for again in (False, True):
        SUSPECTS.check(request)
        try:
            async with _checked_lease(lend) as lease, aclosing(send(lease)) as events:
                async for event in events:
                    silent = False
                    yield event
        except ApiError as error:
            if error.died:
                SUSPECTS.note(request, error.end)
                SUSPECTS.check(request)
            unharmed = error.code == NOT_LOADED or (error.code in _LOST and not error.reached)
            if again or not silent or not unharmed:
                raise
        else:
            return


async def ask_once(
    lend: Lend, work: Callable[[Lease], Awaitable[Reply]], request: BaseModel
) -> Reply:
    """Return the result of `work` for a lease of `lend`; `ask` describes when it is repeated.

    Raises ApiError.
    """

    async def send(lease: Lease) -> AsyncGenerator[Reply, None]:
        yield await work(lease)

    async with aclosing(ask(lend, send, request)) as replies:
        return await anext(replies)


class Suspects:
    """The requests that were running when a backend died, for ten minutes.

    `_seen` has, by the digest of a request, how often that happened, when to forget the request,
    and how the backend ended the last time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[bytes, tuple[int, float, str]] = {}

    def note(self, request: BaseModel, end: str) -> None:
        key = _digest(request)
        count = self._seen.pop(key, (0,))[0]
        self._seen[key] = (count + 1, self._clock() + _REMEMBERED, end)

    def check(self, request: BaseModel) -> None:
        """Raise ApiError for a request that was running when two backends died."""
        now = self._clock()
        self._seen = {key: seen for key, seen in self._seen.items() if seen[1] > now}
        if not self._seen:
            return  # the digest of a long request takes long
        count, _, end = self._seen.get(_digest(request), (0, 0.0, ""))
        if count >= _DEATHS:
            raise ApiError(
                500,
                f"the backend died {count} times while it worked on this request, so the request"
                " is refused for now: change it, or remove the cause, which is"
                f" {f'this: {end}' if end else 'in the log'}",
                SERVER,
                "backend_killed",
            )


SUSPECTS = Suspects()


def _digest(request: BaseModel) -> bytes:
    plain = request.model_dump_json(exclude={"seed", "stream"})
    return hashlib.blake2b(plain.encode(), digest_size=16).digest()


@asynccontextmanager
async def _checked_lease(lend: Lend) -> AsyncIterator[Lease]:
    """Yield a lease. If its backend or model is lost, the next lease checks that backend."""
    async with lend() as lease:
        try:
            yield lease
        except ApiError as error:
            # grpc.aio loses the initial metadata of a stream that ends before the event loop has
            # asked for it, so a broken connection counts too. A backend may refuse and stay alive.
            error.died = error.died and (error.reached or not lease.backend.up)
            if error.died and (end := await lease.backend.ending()):
                error.marked = error.end = without_folders(end)
            if error.code in _LOST:
                lease.backend.doubt(emptied=error.code == NOT_LOADED)
            raise
