"""Encodes the details of a gRPC error: `google.rpc.Status` with `google.rpc.BadRequest`.

The messages are defined here as far as they are used, after googleapis' google/rpc/status.proto and
error_details.proto. The package with all messages is larger than everything else that a gateway
needs for gRPC.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from common.field_names import from_template, template_of

KEY = "grpc-status-details-bin"  # the trailer of gRPC's richer error model
_PACKAGE = "mlx_backend.rpc"  # not Google's, in case its own package is imported as well
_TYPE = "type.googleapis.com/google.rpc.BadRequest"
_KINDS = {"int32": 5, "string": 9}
_REPEATED, _SINGLE, _MESSAGE = 3, 1, 11


def _message(file: Any, name: str, **fields: str) -> None:
    """Add a message to a file descriptor.

    Fields are numbered in the given order; the type of a repeated field is in brackets.
    """
    added = file.message_type.add(name=name)
    for number, (field, given) in enumerate(fields.items(), 1):
        kind = given.strip("[]")
        label = _REPEATED if kind != given else _SINGLE
        made = added.field.add(name=field, number=number, label=label)
        made.type = _KINDS.get(kind, _MESSAGE)
        if made.type == _MESSAGE:
            made.type_name = f".{kind}" if "." in kind else f".{_PACKAGE}.{kind}"


def _classes() -> tuple[Any, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="mlx_backend/rpc.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=["google/protobuf/any.proto"],
    )
    _message(file, "FieldViolation", field="string", description="string")
    _message(file, "BadRequest", field_violations="[FieldViolation]")
    _message(file, "Status", code="int32", message="string", details="[google.protobuf.Any]")
    pool = descriptor_pool.Default()
    pool.Add(file)
    of = pool.FindMessageTypeByName
    get = message_factory.GetMessageClass
    return get(of(f"{_PACKAGE}.Status")), get(of(f"{_PACKAGE}.BadRequest"))


_Status, _BadRequest = _classes()


def packed(code: int, text: str, message: str, fields: Sequence[str]) -> bytes:
    """Return the serialised details of an error.

    text: the message of the status.
    message: the same message with marked field names. Its template becomes the description of the
        first violation.
    fields: the fields that the error concerns, with the wrong field first.
    """
    request = _BadRequest()
    for name in fields:
        request.field_violations.add(field=name)
    request.field_violations[0].description = template_of(message, fields)
    detail = any_pb2.Any(type_url=_TYPE, value=request.SerializeToString())
    raw: bytes = _Status(code=code, message=text, details=[detail]).SerializeToString()
    return raw


def unpacked(raw: bytes) -> tuple[tuple[str, ...], str]:
    """Return the fields of an error, and its message with marked field names.

    Both are empty if the details have none.
    """
    try:
        status = _Status.FromString(raw)
        details = [each.value for each in status.details if each.type_url == _TYPE]
        found = [v for each in details for v in _BadRequest.FromString(each).field_violations]
    except DecodeError:
        found = []
    fields = tuple(violation.field for violation in found)
    return fields, from_template(found[0].description, fields) if fields else ""
