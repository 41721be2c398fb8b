"""Defines errors as clients receive them: one exception, one table, OpenAI's error object.

Every refusal of the gateway is an ApiError. The table below turns a backend's gRPC status into one,
with the backend's own message, which is written for users.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from common import error_details
from common.field_names import fields_in, renamed, shortened, unmarked, written
from gateway import exchange

INVALID = "invalid_request_error"
BACKEND_GONE = "backend_unavailable"  # the code for a process that died
NOT_LOADED = "model_not_loaded"  # the code for a process without a model
SERVER = "server_error"
_LONGEST = 2000  # characters of a message, which may quote what a client sent
RETRY_AFTER = 1  # default seconds that a client should wait
# Absolute paths, but no URLs, and no pointers into the JSON schema that the client itself sent.
_FOLDERS = re.compile(
    r"(?<![\w.:/#])/(?!\$defs/|definitions/|properties/)(?:[^\s/'\",:;()]+/)+(?=[^\s/])"
)
_GONE = "the backend of this model has ended: send the request again"
_SLOW = "the answer took longer than this gateway allows"
_SILENT = "the backend failed without saying why"
_REFUSED = "the backend refused the gateway: its address or its token is wrong"
_CODE = "mlx-error-code"  # trailing metadata (backend/rpc/statuses.py)
_STOPPING = "shutting_down"  # the code of a process that is being stopped
_REACHED = "mlx-reached"  # initial metadata (backend/rpc/interceptors.py)
_STEP = re.compile(r"[.\[]|$")
Names = Mapping[str, str]  # path of a field → the client's name for it
AS_ON_THE_WIRE: Names = {}


@dataclass
class ApiError(Exception):
    """A refusal: HTTP status, message, and the fields of OpenAI's error object.

    marked: the message, which may mark the names of fields (common/field_names).
    param: by default the first marked name.
    """

    status: int
    marked: str
    type: str = INVALID
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None  # seconds
    reached: bool = False  # a backend had begun to work on the request
    died: bool = False  # the backend may have died while it worked on the request
    end: str = ""  # how the backend ended, if that is known
    extra_headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields = fields_in(self.marked)
        self.marked = shortened(self.marked, _LONGEST, fields)
        self.param = self.param or next(iter(fields), None)

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        return written(self.marked)

    @property
    def full_message(self) -> str:
        """The message with the field at fault, for APIs that have no `param`."""
        named = self.param is None or self.param in self.message
        return self.message if named else f"{self.param}: {self.message}"

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object (API reference, "Error codes")."""
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}

    def renamed(self, name_of: Callable[[str], str]) -> ApiError:
        param = self.param and name_of(self.param)
        return replace(self, marked=renamed(self.marked, name_of), param=param)

    def headers(self) -> dict[str, str]:
        """Return headers, with `x-should-retry`, which OpenAI's SDKs read before the status."""
        headers = {"x-should-retry": "true" if self.retry_after is not None else "false"}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        return headers | dict(self.extra_headers)


@dataclass(frozen=True)
class Row:
    """The HTTP form of a gRPC status."""

    status: int
    type: str = INVALID
    code: str | None = None
    retry: bool = False
    message: str = ""  # replaces the backend's, where that would not help a client


TABLE: Mapping[grpc.StatusCode, Row] = {
    grpc.StatusCode.INVALID_ARGUMENT: Row(400),
    grpc.StatusCode.OUT_OF_RANGE: Row(400),
    grpc.StatusCode.UNIMPLEMENTED: Row(400, code="unsupported"),
    # The backend now has another model, as one at an address may have; the next load reports it.
    grpc.StatusCode.NOT_FOUND: Row(503, SERVER, NOT_LOADED, retry=True),
    grpc.StatusCode.UNAUTHENTICATED: Row(502, SERVER, "backend_refused", message=_REFUSED),
    grpc.StatusCode.PERMISSION_DENIED: Row(502, SERVER, "backend_refused", message=_REFUSED),
    grpc.StatusCode.DEADLINE_EXCEEDED: Row(504, SERVER, "timeout", message=_SLOW),
    grpc.StatusCode.RESOURCE_EXHAUSTED: Row(429, "rate_limit_error", "overloaded", retry=True),
    grpc.StatusCode.FAILED_PRECONDITION: Row(503, SERVER, NOT_LOADED, retry=True),
    grpc.StatusCode.CANCELLED: Row(503, SERVER, "cancelled", retry=True),
    # gRPC's message about a broken connection is about sockets, and names addresses.
    grpc.StatusCode.UNAVAILABLE: Row(503, SERVER, BACKEND_GONE, True, _GONE),
    grpc.StatusCode.ABORTED: Row(503, SERVER, BACKEND_GONE, True, _GONE),
    grpc.StatusCode.INTERNAL: Row(500, SERVER, "backend_failed"),
    grpc.StatusCode.DATA_LOSS: Row(500, SERVER, "backend_failed"),
    # gRPC's status for an uncaught exception, whose text is about the program.
    grpc.StatusCode.UNKNOWN: Row(500, SERVER, "backend_failed", message=_SILENT),
}
# By the code that a backend sends beside its status.
CODES: Mapping[str, Row] = {"context_length_exceeded": Row(400, code="context_length_exceeded")}
TOO_LARGE = Row(413, code="request_too_large", message="the request is too large for the backend")


def bad_field(message: str, code: str | None = None, *, param: str | None = None) -> ApiError:
    """Return a 400 about a field of the request, with the path at which the client sent it."""
    return ApiError(400, message, code=code, param=param)


def too_slow(seconds: float) -> ApiError:
    message = f"the request took longer than {seconds:g} s, which is this gateway's limit"
    return ApiError(504, message, SERVER, "timeout")


def without_folders(message: str) -> str:
    """Return a message in which absolute paths are cut to their last part, for clients."""
    return _FOLDERS.sub("…/", message)


def backend_gone(*, died: bool = False) -> ApiError:
    """Return the error for a request whose connection was closed.

    died: as in ApiError.
    """
    return ApiError(503, _GONE, SERVER, BACKEND_GONE, retry_after=RETRY_AFTER, died=died)


def of_rpc(error: grpc.aio.AioRpcError, names: Names) -> ApiError:
    """Return the error for a backend's status, with the client's names of its fields."""
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    code = trailers.get(_CODE, "")
    fields, message = error_details.unpacked(trailers.get(error_details.KEY, b""))
    row = CODES.get(code) or TABLE.get(error.code(), TABLE[grpc.StatusCode.UNKNOWN])
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED and fields:  # the name of the RPC
        names, fields = {fields[0]: exchange.current().path or fields[0]}, ("model",)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        row = TOO_LARGE  # from gRPC itself: the message was never parsed
    refusal = ApiError(
        row.status,
        row.message or without_folders(message or unmarked(details)) or _SILENT,
        row.type,
        row.code,
        fields[0] if fields else None,
        RETRY_AFTER if row.retry else None,
        reached=_REACHED in dict(error.initial_metadata() or ()),
        died=row.code == BACKEND_GONE and code != _STOPPING,
    )
    return refusal.renamed(lambda name: _client_name(names, name))


def _client_name(names: Names, name: str) -> str:
    known, rest = found_in(names, name)
    # A setting without a field in the protocol has the name used in requests, unless `names`
    # differs.
    return known.removeprefix("Metadata ").removeprefix("mlx.") + rest


def found_in(names: Names, place: str) -> tuple[str, str]:
    """Find the longest prefix of a path that has a name. Returns the name and the rest."""
    for end in reversed([match.start() for match in _STEP.finditer(place)]):
        if place[:end] in names:
            return names[place[:end]], place[end:]
    return place, ""
