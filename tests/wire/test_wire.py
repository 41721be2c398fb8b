"""Holds `backend.proto` against the checked-in facts in `facts.tsv`.

A host built from LocalAI's own proto reads fields by number and type, so a renumbered field or a
changed label would corrupt data silently. The table is rebuilt from the compiled descriptors and
must equal the facts both ways: nothing missing, nothing extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

from wire import backend_pb2

FACTS = Path(__file__).with_name("facts.tsv")

Row = tuple[str, ...]


def compiled() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    backend_pb2.DESCRIPTOR.CopyToProto(file)
    return file


def short(type_name: str) -> str:
    return type_name.removeprefix(".backend.")


def type_of(field: Field) -> str:
    if field.type_name:
        return short(field.type_name)
    return Field.Type.Name(field.type).removeprefix("TYPE_").lower()


def type_and_label(message: DescriptorProto, field: Field) -> tuple[str, str]:
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{message.name}.{nested.name}"):
            key, value = nested.field
            return f"map<{type_of(key)},{type_of(value)}>", "map"
    label = "repeated" if field.label == Field.LABEL_REPEATED else "singular"
    return type_of(field), label


def enum_rows(name: str, enum: EnumDescriptorProto) -> Iterator[Row]:
    for value in enum.value:
        yield "enum", name, str(value.number), value.name


def message_rows(message: DescriptorProto) -> Iterator[Row]:
    yield "message", message.name
    for field in message.field:
        assert not field.HasField("oneof_index"), f"{message.name}.{field.name} has presence"
        yield (
            "field", message.name, str(field.number), field.name, *type_and_label(message, field)
        )  # fmt: skip
    for span in message.reserved_range:
        for number in range(span.start, span.end):
            yield "reserved", message.name, str(number)
    for enum in message.enum_type:
        yield from enum_rows(f"{message.name}.{enum.name}", enum)
    for nested in message.nested_type:
        assert nested.options.map_entry, f"{message.name}.{nested.name} is a nested message"


def rows(file: descriptor_pb2.FileDescriptorProto) -> Iterator[Row]:
    yield "syntax", file.syntax
    yield "package", file.package
    for service in file.service:
        for rpc in service.method:
            sides = (str(rpc.client_streaming).lower(), str(rpc.server_streaming).lower())
            yield (
                "rpc",
                service.name,
                rpc.name,
                short(rpc.input_type),
                short(rpc.output_type),
                *sides,
            )
    for message in file.message_type:
        yield from message_rows(message)
    for enum in file.enum_type:
        yield from enum_rows(enum.name, enum)


def facts() -> list[Row]:
    return [tuple(line.split("\t")) for line in FACTS.read_text().splitlines()]


def test_the_compiled_proto_equals_the_facts() -> None:
    table = list(rows(compiled()))
    assert set(table) - set(facts()) == set(), "in backend.proto, but not in the facts"
    assert set(facts()) - set(table) == set(), "in the facts, but not in backend.proto"
    assert len(table) == len(set(table)) == len(facts())
