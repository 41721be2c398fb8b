"""Turns the exceptions of a gRPC call into the errors that clients see."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from gateway import errors
from gateway.errors import Names


@contextmanager
def as_refusals(names: Names) -> Iterator[None]:
    """Raise ApiError, in the client's `names`, for every end of a call but a good one.

    A channel that is closed cancels its calls, so their readers get a CancelledError that nobody
    asked for: only the cancellation of the task itself is raised as one.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise errors.of_rpc(error, names) from None
    except grpc.aio.UsageError:  # the channel was closed before the call began
        raise errors.gone() from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise errors.gone() from None


def is_cancelled() -> bool:
    """Whether somebody wants the running task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
