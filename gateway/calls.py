"""Makes calls to a backend, with time limits, and turns their failures into ApiErrors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from gateway import errors, exchange
from gateway.errors import AS_ON_THE_WIRE, Names

Reply = TypeVar("Reply")
Metadata = Sequence[tuple[str, str | bytes]]
_TRUNCATED = "mlx-truncated-tokens"
_AT_ONCE = 32  # for one request, because the backend's queue is shared


async def ask(
    method: Callable[..., Awaitable[Reply]],
    request: Any,
    seconds: float,
    names: Names = AS_ON_THE_WIRE,
    metadata: Metadata = (),
) -> Reply:
    """Make one call, which is cancelled with its task, and return the reply. Raises ApiError.

    seconds: the time limit; 0 for none.
    names: the client's names of the wire's fields, for errors.
    """
    with as_refusals(names):
        call: Any = method(request, timeout=seconds or None, metadata=metadata)
        reply: Reply = await call
        for key, value in await call.trailing_metadata() or ():
            if key == _TRUNCATED:
                exchange.current().truncated += int(value)
        return reply


async def ask_all(
    method: Callable[..., Awaitable[Reply]],
    requests: Sequence[Any],
    seconds: float,
    names: Callable[[int], Names] = lambda _: AS_ON_THE_WIRE,
    metadata: Metadata = (),
) -> list[Reply]:
    """Make calls as `ask` does, and return the replies in order. The first failure ends all calls.

    names: the client's names of the wire's fields, by the index of the request.
    """
    replies: list[Any] = [None] * len(requests)
    waiting = iter(range(len(requests)))

    async def work() -> None:
        for index in waiting:
            replies[index] = await ask(method, requests[index], seconds, names(index), metadata)

    tasks = [asyncio.ensure_future(work()) for _ in range(_AT_ONCE)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return replies


@contextmanager
def as_refusals(names: Names) -> Iterator[None]:
    """Raise ApiError, with the client's `names` of fields, if a call fails.

    Closing a channel cancels its calls, and their readers get a CancelledError. Only the
    cancellation of the task itself is raised as such.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise errors.of_rpc(error, names) from None
    except grpc.aio.UsageError:  # the channel was closed before the call began
        raise errors.backend_gone() from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise errors.backend_gone(died=True) from None


def is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
