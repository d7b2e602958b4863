"""The generated code has exactly the services, messages, fields and enums of the contract, with their numbers."""

from typing import Any, NamedTuple

import contract_admin
import contract_debug
import contract_insight
import contract_kv_meta
import contract_meta
import contract_v1
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor, MethodDescriptor

from kvcm.protocol import admin_service_pb2, debug_service_pb2, kv_meta_service_pb2, meta_service_pb2
from kvcm.protocol.kvcm.v1 import (
    access_service_pb2,
    capacity_service_pb2,
    group_service_pb2,
    insight_service_pb2,
    lease_service_pb2,
    pin_service_pb2,
    pool_service_pb2,
    storage_service_pb2,
    unread_pb2,
)


class Contract(NamedTuple):
    """What one .proto file must declare."""

    name: str
    file: FileDescriptor
    package: str
    services: dict[str, dict[str, tuple[str, str]]]
    enums: dict[str, dict[str, int]]
    messages: dict[str, dict[str, str]]


def of(module: Any, data: Any, name: str) -> Contract:
    return Contract(name, module.DESCRIPTOR, data.PACKAGE, data.SERVICES, data.ENUMS, data.MESSAGES)


V1 = contract_v1
CONTRACTS = [
    of(meta_service_pb2, contract_meta, "meta_service.proto"),
    of(admin_service_pb2, contract_admin, "admin_service.proto"),
    of(debug_service_pb2, contract_debug, "debug_service.proto"),
    of(kv_meta_service_pb2, contract_kv_meta, "kv_meta_service.proto"),
    Contract("kvcm/v1/unread.proto", unread_pb2.DESCRIPTOR, V1.PACKAGE, {}, {}, V1.UNREAD_MESSAGES),
    Contract(
        "kvcm/v1/lease_service.proto",
        lease_service_pb2.DESCRIPTOR,
        V1.PACKAGE,
        V1.LEASE_SERVICES,
        {},
        V1.LEASE_MESSAGES,
    ),
    Contract(
        "kvcm/v1/group_service.proto",
        group_service_pb2.DESCRIPTOR,
        V1.PACKAGE,
        V1.GROUP_SERVICES,
        {},
        V1.GROUP_MESSAGES,
    ),
    Contract(
        "kvcm/v1/pin_service.proto",
        pin_service_pb2.DESCRIPTOR,
        V1.PACKAGE,
        V1.PIN_SERVICES,
        {},
        V1.PIN_MESSAGES,
    ),
    Contract(
        "kvcm/v1/capacity_service.proto",
        capacity_service_pb2.DESCRIPTOR,
        V1.PACKAGE,
        V1.CAPACITY_SERVICES,
        {},
        V1.CAPACITY_MESSAGES,
    ),
    Contract(
        "kvcm/v1/storage_service.proto",
        storage_service_pb2.DESCRIPTOR,
        V1.PACKAGE,
        V1.STORAGE_SERVICES,
        V1.STORAGE_ENUMS,
        V1.STORAGE_MESSAGES,
    ),
    Contract(
        "kvcm/v1/insight_service.proto",
        insight_service_pb2.DESCRIPTOR,
        V1.PACKAGE,
        contract_insight.INSIGHT_SERVICES,
        contract_insight.INSIGHT_ENUMS,
        contract_insight.INSIGHT_MESSAGES,
    ),
    Contract(
        "kvcm/v1/pool_service.proto",
        pool_service_pb2.DESCRIPTOR,
        V1.PACKAGE,
        V1.POOL_SERVICES,
        {},
        V1.POOL_MESSAGES,
    ),
    Contract(
        "kvcm/v1/access_service.proto",
        access_service_pb2.DESCRIPTOR,
        V1.PACKAGE,
        V1.ACCESS_SERVICES,
        V1.ACCESS_ENUMS,
        V1.ACCESS_MESSAGES,
    ),
]

KINDS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_FIXED64: "fixed64",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_STRING: "string",
}


def in_package(kind: Any, package: str) -> str:
    """The name of a message or enum as a .proto file of that package writes it."""
    return str(kind.full_name).removeprefix(f"{package}.")


def modifier(field: FieldDescriptor) -> str:
    if field.is_repeated:
        return "repeated "
    if field.containing_oneof is None:
        return ""
    # The compiler wraps an optional field into a oneof of its own, whose name begins with an underscore.
    if field.containing_oneof.name == f"_{field.name}":
        return "optional "
    return f"oneof {field.containing_oneof.name}: "


def written(field: FieldDescriptor, package: str) -> str:
    named = field.message_type or field.enum_type
    kind = in_package(named, package) if named else KINDS[field.type]
    return f"{field.number} {modifier(field)}{kind}"


def fields(message: Descriptor, package: str) -> dict[str, str]:
    return {field.name: written(field, package) for field in message.fields}


def call(method: MethodDescriptor, package: str) -> tuple[str, str]:
    assert not method.client_streaming
    assert not method.server_streaming
    return in_package(method.input_type, package), in_package(method.output_type, package)


@pytest.fixture(params=CONTRACTS, ids=lambda contract: contract.name)
def contract(request: pytest.FixtureRequest) -> Contract:
    return request.param  # type: ignore[no-any-return]


def test_file_and_package(contract: Contract) -> None:
    assert contract.file.name == contract.name
    assert contract.file.package == contract.package


def test_services(contract: Contract) -> None:
    found = {
        name: {method.name: call(method, contract.package) for method in service.methods}
        for name, service in contract.file.services_by_name.items()
    }
    assert found == contract.services


def test_enums(contract: Contract) -> None:
    found = {
        name: {value.name: value.number for value in enum.values}
        for name, enum in contract.file.enum_types_by_name.items()
    }
    assert found == contract.enums


def test_messages_are_exactly_those_of_the_contract(contract: Contract) -> None:
    assert set(contract.file.message_types_by_name) == set(contract.messages)


def test_fields(contract: Contract) -> None:
    found = {name: fields(message, contract.package) for name, message in contract.file.message_types_by_name.items()}
    assert found == contract.messages


def test_our_own_fields_are_numbered_from_1000() -> None:
    """Numbers below belong to the original, which goes on adding fields."""
    ours = {
        f"{contract.package}.{message.name}.{field.name}"
        for contract in CONTRACTS
        for message in contract.file.message_types_by_name.values()
        for field in message.fields
        if field.number >= 1000
    }
    assert ours == {
        "kv_cache_manager.proto.admin.LoadConfigSnapshotRequest.dry_run",
        "kv_cache_manager.proto.admin.LoadConfigSnapshotRequest.prune",
        "kv_cache_manager.proto.admin.LoadConfigSnapshotResponse.changes",
        "kv_cache_manager.proto.meta.StartWriteCacheRequest.parent_block_key",
        "kv_cache_manager.proto.meta.StartWriteCacheRequest.node_id",
        "kv_cache_manager.proto.meta.GetCacheLocationRequest.node_id",
        "kv_cache_manager.proto.meta.GetCacheLocationLenRequest.node_id",
        "kv_cache_manager.proto.meta.LocationSpec.checksum",
        "kv_cache_manager.proto.admin.LocationSpec.checksum",
        "kv_cache_manager.proto.meta.TairMemPoolStorageSpec.node_id",
        "kv_cache_manager.proto.meta.TairMemPoolStorageSpec.capacity_bytes",
        "kv_cache_manager.proto.admin.TairMemPoolStorageSpec.node_id",
        "kv_cache_manager.proto.admin.TairMemPoolStorageSpec.capacity_bytes",
        "kv_cache_manager.proto.meta.GetCacheLocationRequest.read_lease_ms",
        "kv_cache_manager.proto.meta.GetCacheLocationRequest.peek",
        "kv_cache_manager.proto.meta.GetCacheLocationRequest.require_location_specs",
        "kv_cache_manager.proto.meta.GetCacheLocationLenRequest.peek",
        "kv_cache_manager.proto.meta.GetCacheLocationResponse.read_lease_id",
        "kvcm.v1.UnreadCacheLocations.read_lease_id",
        "kv_cache_manager.proto.meta.GetCacheLocationResponse.read_lease_deadline_ms",
        "kv_cache_manager.proto.meta.LocationSpecInfo.kind",
        "kv_cache_manager.proto.admin.LocationSpecInfo.kind",
        "kv_cache_manager.proto.meta.FinishWriteCacheRequest.retention",
        "kv_cache_manager.proto.admin.StorageConfig.capacity_bytes",
        "kv_cache_manager.proto.admin.StorageConfig.used_percentage",
        "kv_cache_manager.proto.admin.ListStorageResponse.storage_status",
        "kv_cache_manager.proto.admin.TriggerStrategy.hysteresis",
        "kv_cache_manager.proto.admin.CacheReclaimStrategy.policy",
        "kv_cache_manager.proto.admin.CacheReclaimStrategy.share",
        "kv_cache_manager.proto.admin.CacheReclaimStrategy.prefix_classes",
        "kv_cache_manager.proto.admin.CacheReclaimStrategy.instance_overrides",
        "kv_cache_manager.proto.admin.InstanceGroup.storage_guarantees",
        "kv_cache_manager.proto.admin.InstanceGroup.pin_budget_bytes",
    }
