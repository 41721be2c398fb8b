"""What a client sees of a failed call, and calls with arbitrary bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
import pytest


class Failure(NamedTuple):
    code: grpc.StatusCode
    sentence: str


def failure_of(work: Callable[[], Any]) -> Failure:
    """The status of a call that must fail; a stream is read to its end."""
    with pytest.raises(grpc.RpcError) as caught:
        _finish(work)
    error: Any = caught.value
    return Failure(error.code(), error.details() or "")


def _finish(work: Callable[[], Any]) -> None:
    answer = work()
    if isinstance(answer, Iterator):
        for _ in answer:
            pass


def raw_call(channel: grpc.Channel, path: str, request: bytes, metadata: Any = ()) -> Any:
    """Send these bytes as the request; the result is an iterator, also for a unary method."""
    method: Any = channel.unary_stream(path)
    return method(request, metadata=metadata)
