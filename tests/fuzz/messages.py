"""Protocol messages from any bytes, so that what a fuzzer changes remains a valid message.

Each part between two bytes 0xff sets a field: its first byte chooses which, the rest is the value.
Parts of a nested message are between bytes 0xfe, then 0xfd.
"""

from __future__ import annotations

import struct
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_SMALLEST, _LARGEST = -(2**31), 2**31 - 1


def fill(message: Message, given: bytes, depth: int = 0) -> None:
    """Set the message's fields from the bytes."""
    fields: Any = message.DESCRIPTOR.fields
    for part in given.split(bytes([0xFF - depth])):
        if part and fields:
            _set(message, fields[part[0] % len(fields)], part[1:], depth)


def _set(message: Any, field: FieldDescriptor, given: bytes, depth: int) -> None:
    kind: Descriptor | None = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, _, value = given.partition(b"=")
        if kind.fields_by_name["value"].cpp_type == FieldDescriptor.CPPTYPE_STRING:
            getattr(message, field.name)[key.decode(errors="replace")] = value.decode(
                errors="replace"
            )
    elif kind is not None:
        place = getattr(message, field.name)
        fill(place.add() if field.is_repeated else place, given, depth + 1)
    elif field.is_repeated:
        getattr(message, field.name).append(_value(field, given))
    else:
        setattr(message, field.name, _value(field, given))


def _value(field: FieldDescriptor, given: bytes) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        text = given.decode(errors="replace")
        return given if field.type == FieldDescriptor.TYPE_BYTES else text
    if field.cpp_type in _FLOATS:
        return struct.unpack("<f", given[:4].ljust(4, b"\0"))[0]
    number = int.from_bytes(given[:8], "little", signed=True)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return bool(number)
    smallest = 0 if field.cpp_type in _UNSIGNED else _SMALLEST
    return min(max(number, smallest), _LARGEST)
