"""What a client is told when something is wrong: one exception, one table, OpenAI's error object.

Every refusal of the gateway is an ApiError. A gRPC status of a backend becomes one by the table
below, with the backend's own sentence: backends write theirs for the person who reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

INVALID = "invalid_request_error"
SERVER = "server_error"
RETRY_AFTER = 1  # seconds that a client should wait where nothing better is known


@dataclass
class ApiError(Exception):
    """A refusal: HTTP status, sentence, and the fields of OpenAI's error object."""

    status: int
    message: str
    type: str = INVALID
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None  # seconds

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """OpenAI's error object (API reference, "Error codes")."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """`x-should-retry` is what OpenAI's SDKs read before they look at the status."""
        headers = {"x-should-retry": "true" if self.retry_after is not None else "false"}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        return headers


@dataclass(frozen=True)
class _Row:
    status: int
    type: str = INVALID
    code: str | None = None
    retry: bool = False


_TABLE: Mapping[grpc.StatusCode, _Row] = {
    grpc.StatusCode.INVALID_ARGUMENT: _Row(400),
    grpc.StatusCode.OUT_OF_RANGE: _Row(400),
    grpc.StatusCode.UNIMPLEMENTED: _Row(400, code="unsupported"),
    grpc.StatusCode.NOT_FOUND: _Row(404, code="model_not_found"),
    grpc.StatusCode.UNAUTHENTICATED: _Row(502, SERVER, "backend_refused"),
    grpc.StatusCode.PERMISSION_DENIED: _Row(502, SERVER, "backend_refused"),
    grpc.StatusCode.DEADLINE_EXCEEDED: _Row(504, SERVER, "timeout"),
    grpc.StatusCode.CANCELLED: _Row(503, SERVER, "cancelled", retry=True),
    grpc.StatusCode.RESOURCE_EXHAUSTED: _Row(429, "rate_limit_error", "overloaded", retry=True),
    grpc.StatusCode.FAILED_PRECONDITION: _Row(503, SERVER, "model_not_loaded", retry=True),
    grpc.StatusCode.UNAVAILABLE: _Row(503, SERVER, "backend_unavailable", retry=True),
    grpc.StatusCode.ABORTED: _Row(503, SERVER, "backend_unavailable", retry=True),
}
_OTHER = _Row(500, SERVER)


def of_rpc(error: grpc.aio.AioRpcError) -> ApiError:
    """The refusal that a backend's status stands for."""
    row = _TABLE.get(error.code(), _OTHER)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        # What gRPC says of a broken connection is about sockets, and names addresses.
        message = "the backend of this model has gone away: send the request again"
    else:
        message = error.details() or "the backend failed without saying why"
    return ApiError(
        row.status,
        message,
        row.type,
        row.code,
        retry_after=RETRY_AFTER if row.retry else None,
    )
