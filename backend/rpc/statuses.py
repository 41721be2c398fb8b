"""Which gRPC status an exception becomes, and with which words (contract 1.10, 4.11.4).

The host reads meaning out of codes and even out of substrings of the text, and shows the text to
end users. So FAILED_PRECONDITION is kept for "no model", an unknown exception says nothing of
itself, and words that would set off the host by accident are exchanged for harmless ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpc import StatusCode

from backend.engine import errors

IDENTITY_MISMATCH = "model identity mismatch"
ERROR_CODE = "mlx-error-code"
ERROR_FIELD = "mlx-error-field"  # once for each field, the one at fault first
_LONGEST_SENTENCE = 1000  # details travel in a trailer, and those are capped at some KiB


class NotServed(Exception):
    """An RPC that this backend knows and does not serve."""


class IdentityMismatch(Exception):
    """The request is meant for another model than the loaded one."""

    def __init__(self, loaded: str, requested: str) -> None:
        super().__init__(f"{IDENTITY_MISMATCH}: loaded {loaded!r}, requested {requested!r}")


@dataclass(frozen=True, slots=True)
class Status:
    """What the caller gets to see. `expected` is False for a fault of ours.

    trailers: the error's code and the request's fields that the sentence names, for programs, so
    that nobody has to read them out of the sentence.
    """

    code: StatusCode
    sentence: str
    expected: bool = True
    trailers: tuple[tuple[str, str], ...] = ()


_CODES: dict[type[Exception], StatusCode] = {
    errors.InvalidRequest: StatusCode.INVALID_ARGUMENT,
    errors.ModelRejected: StatusCode.INVALID_ARGUMENT,
    errors.NotLoaded: StatusCode.FAILED_PRECONDITION,
    errors.Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    errors.TooLong: StatusCode.RESOURCE_EXHAUSTED,
    errors.WrongKind: StatusCode.UNIMPLEMENTED,
    errors.ModelNotFound: StatusCode.NOT_FOUND,
    errors.ShuttingDown: StatusCode.UNAVAILABLE,
    errors.Cancelled: StatusCode.CANCELLED,
    NotServed: StatusCode.UNIMPLEMENTED,
    IdentityMismatch: StatusCode.NOT_FOUND,
}

# Phrase that the host acts on → the code or exception it belongs to, and what to say elsewhere.
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
    """The status for an exception that a call ended with."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return Status(code, _defused(error), trailers=_trailers(error))
    if isinstance(error, errors.EngineFailed):
        return Status(StatusCode.INTERNAL, _defused(error), expected=False)
    return Status(StatusCode.INTERNAL, "internal error; see the backend log", expected=False)


def _trailers(error: Exception) -> tuple[tuple[str, str], ...]:
    """Metadata holds ASCII only, and a field may name a key that a client made up."""
    if not isinstance(error, errors.EngineError):
        return ()
    told = (
        (ERROR_CODE, error.code),
        *((ERROR_FIELD, field.encode("ascii", "replace").decode()) for field in error.fields),
    )
    return tuple((key, value) for key, value in told if value)


def _defused(error: Exception) -> str:
    sentence = str(error)
    for phrase, owner, harmless in _TRIGGERS:
        if owner is None or not isinstance(error, owner):
            sentence = phrase.sub(harmless, sentence)
    if len(sentence) > _LONGEST_SENTENCE:
        sentence = sentence[: _LONGEST_SENTENCE - 1] + "…"
    return sentence.encode("utf-8", "replace").decode()
