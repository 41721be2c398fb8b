"""Maps each exception to a gRPC status and a message.

LocalAI reacts to certain codes, and even to certain phrases in the message, and shows the message
to end users. So FAILED_PRECONDITION is used only for "no model loaded", the text of an unknown
exception is not shown, and phrases that would make LocalAI react wrongly are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from grpc import StatusCode

from backend.engine import errors
from backend.rpc.fields import message_with_keys
from common import error_details
from common.field_names import shortened
from common.wording import shown

IDENTITY_MISMATCH = "model identity mismatch"
ERROR_CODE = "mlx-error-code"
# Both travel in trailers. If these are larger than 8 KiB together, gRPC may refuse them, and cancel
# every call of the connection. In the message, each byte that is not ASCII becomes three.
_LONGEST_MESSAGE = 1000  # bytes of UTF-8
_LARGEST_DETAILS = 4096
_LENGTHS = (1000, 400)  # characters of the message in the details, the second for four bytes each
_MOST_FIELDS, _LONGEST_NAME = 4, 64


class NotServed(Exception):
    """An RPC that this backend does not implement."""


class IdentityMismatch(Exception):
    """The request is meant for a model other than the loaded one."""

    def __init__(self, loaded: str, requested: str) -> None:
        super().__init__(
            f"{IDENTITY_MISMATCH}: loaded {shown(loaded)}, requested {shown(requested)}"
        )


@dataclass(frozen=True, slots=True)
class Status:
    """The status and message for the caller. `expected` is False for an internal error.

    trailers: the error's code and its details: the fields that the message names, so that programs
        need not extract them from the text.
    """

    code: StatusCode
    message: str
    expected: bool = True
    trailers: tuple[tuple[str, str | bytes], ...] = ()


_CODES: dict[type[Exception], StatusCode] = {
    errors.InvalidRequest: StatusCode.INVALID_ARGUMENT,
    errors.ModelRejected: StatusCode.INVALID_ARGUMENT,
    errors.NotLoaded: StatusCode.FAILED_PRECONDITION,
    errors.Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    # LocalAI explains RESOURCE_EXHAUSTED of Embedding as an answer that is too large.
    errors.TooLong: StatusCode.INVALID_ARGUMENT,
    errors.WrongKind: StatusCode.UNIMPLEMENTED,
    errors.ModelNotFound: StatusCode.NOT_FOUND,
    errors.ShuttingDown: StatusCode.UNAVAILABLE,
    errors.Cancelled: StatusCode.CANCELLED,
    NotServed: StatusCode.UNIMPLEMENTED,
    IdentityMismatch: StatusCode.NOT_FOUND,
}

# A phrase that LocalAI reacts to, the exception that it belongs to, its replacement in others.
_TRIGGERS: tuple[tuple[re.Pattern[str], type[Exception] | None, str], ...] = tuple(
    (re.compile(re.escape(phrase), re.IGNORECASE), owner, harmless)
    for phrase, owner, harmless in (
        ("model not loaded", errors.NotLoaded, "model is not loaded"),
        ("unimplemented", NotServed, "not implemented"),
        (IDENTITY_MISMATCH, IdentityMismatch, "identity of the model differs"),
        ("connection refused", None, "connection was refused"),
        ("connection reset", None, "connection was reset"),
        ("no such host", None, "host unknown"),
    )
)


def status_of(error: Exception) -> Status:
    error = errors.refused_by_system(error) or error
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            message = _message_of(error)
            return Status(code, message, trailers=tuple(_trailers(error, code, message)))
    if isinstance(error, errors.EngineFailed):
        return Status(StatusCode.INTERNAL, _message_of(error), expected=False)
    return Status(StatusCode.INTERNAL, "internal error; see the backend log", expected=False)


def _trailers(
    error: Exception, code: StatusCode, message: str
) -> Iterator[tuple[str, str | bytes]]:
    if not isinstance(error, errors.EngineError):
        return
    if error.code:
        yield ERROR_CODE, error.code
    if error.fields:
        fields = tuple(_valid(name)[:_LONGEST_NAME] for name in error.fields[:_MOST_FIELDS])
        number: int = code.value[0]
        for longest in _LENGTHS:
            marked = shortened(_valid(error.message), longest, fields)
            details = error_details.packed(number, message, marked, fields)
            if len(details) <= _LARGEST_DETAILS:
                break
        yield error_details.KEY, details


def _message_of(error: Exception) -> str:
    own = tuple(owner is not None and isinstance(error, owner) for _, owner, _ in _TRIGGERS)
    message = error.message if isinstance(error, errors.EngineError) else str(error)
    return _client_message(message, own)


@lru_cache(maxsize=8)
def _client_message(message: str, own: tuple[bool, ...]) -> str:
    """Return the message for the client, with phrases of other errors (`_TRIGGERS`) replaced.

    own: for each trigger, whether the error may contain its phrase.

    Cached, because under overload most calls end with the same message.
    """
    message = message_with_keys(message)
    for (phrase, _, harmless), belongs in zip(_TRIGGERS, own, strict=True):
        if not belongs:
            message = phrase.sub(harmless, message)
    raw = message.encode("utf-8", "replace")
    if len(raw) > _LONGEST_MESSAGE:
        end = "…".encode()
        raw = raw[: _LONGEST_MESSAGE - len(end)].decode(errors="ignore").encode() + end
    return raw.decode()


def _valid(text: str) -> str:
    """Return the text without halves of surrogate pairs, which UTF-8 cannot represent."""
    return text.encode("utf-8", "replace").decode()
