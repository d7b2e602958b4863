"""The generated code has exactly the services, messages, fields and enums of the contract, with their numbers.

The contract stands a second time in `contract.txt`, one declaration a line, so that a change of a .proto file must be
made in both places. Run this file as a program to print the declarations of the generated code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from kvcm.protocol import (
    admin_service_pb2,
    debug_service_pb2,
    indexer_pb2,
    kv_indexer_pb2,
    kv_meta_service_pb2,
    meta_service_pb2,
)
from kvcm.protocol.kvcm.v1 import (
    access_service_pb2,
    capacity_service_pb2,
    group_service_pb2,
    insight_service_pb2,
    lease_service_pb2,
    pin_service_pb2,
    pool_service_pb2,
    residency_service_pb2,
    storage_service_pb2,
    unread_pb2,
)

CONTRACT = Path(__file__).with_name("contract.txt")
MODULES = [
    meta_service_pb2, admin_service_pb2, debug_service_pb2, kv_meta_service_pb2, unread_pb2, lease_service_pb2,
    group_service_pb2, pin_service_pb2, capacity_service_pb2, storage_service_pb2, insight_service_pb2,
    pool_service_pb2, access_service_pb2, residency_service_pb2, kv_indexer_pb2, indexer_pb2,
]  # fmt: skip
KINDS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_FIXED64: "fixed64",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_SFIXED64: "sfixed64",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_UINT64: "uint64",
}


def declarations(file: FileDescriptor) -> Iterator[str]:
    """Yield what a .proto file declares, sorted within each kind."""
    yield f"file {file.name}: package {file.package}"
    for service in sorted(file.services_by_name.values(), key=lambda each: each.name):
        for method in service.methods:
            assert not method.client_streaming
            assert not method.server_streaming
            types = [_in_package(kind, file.package) for kind in (method.input_type, method.output_type)]
            yield f"rpc {service.name}.{method.name}({types[0]}) returns {types[1]}"
    for enum in sorted(file.enum_types_by_name.values(), key=lambda each: each.name):
        for value in enum.values:
            yield f"enum {enum.name}: {value.name} = {value.number}"
    for message in sorted(file.message_types_by_name.values(), key=lambda each: each.name):
        yield f"message {message.name}"
        yield from (f"  {field.name} = {_written(field, file.package)}" for field in message.fields)


def _in_package(kind: Any, package: str) -> str:
    """The name of a message or enum as a .proto file of that package writes it."""
    return str(kind.full_name).removeprefix(f"{package}.")


def _written(field: FieldDescriptor, package: str) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (KINDS[each.type] for each in field.message_type.fields)
        return f"{field.number} map<{key}, {value}>"
    named: Descriptor | None = field.message_type or field.enum_type
    kind = _in_package(named, package) if named is not None else KINDS[field.type]
    return f"{field.number} {_modifier(field)}{kind}"


def _modifier(field: FieldDescriptor) -> str:
    if field.is_repeated:
        return "repeated "
    if field.containing_oneof is None:
        return ""
    # The compiler wraps an optional field into a oneof of its own, whose name begins with an underscore.
    if field.containing_oneof.name == f"_{field.name}":
        return "optional "
    return f"oneof {field.containing_oneof.name}: "


def generated() -> list[str]:
    """Return the declarations of all files."""
    return [line for module in MODULES for line in declarations(module.DESCRIPTOR)]


def test_the_generated_code_declares_the_contract() -> None:
    assert generated() == CONTRACT.read_text().splitlines()


if __name__ == "__main__":
    print("\n".join(generated()))
