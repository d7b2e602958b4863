"""Between wire messages and model values. Field names agree, so one generic translation serves nearly all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import Int64Value

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import Instance
from kvcm.model.storages import (
    DummyStorageSpec,
    EventReportStorageSpec,
    LocalStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageType,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.registry.validation import require

__all__ = ["fill", "instance_of", "read", "read_storage", "storage_of", "write_storage"]

Value = TypeVar("Value")

_FIRST_ADDITION = 1000  # number of a field; smaller ones are the original's

_SPEC_OF_FIELD: dict[str, type[Any]] = {
    "local": LocalStorageSpec,
    "threefs": ThreeFSStorageSpec,
    "mooncake": MooncakeStorageSpec,
    "tair_mem_pool": TairMemPoolStorageSpec,
    "nfs": NfsStorageSpec,
    "vcnsthreefs": VcnsThreeFSStorageSpec,
    "dummy": DummyStorageSpec,
    "event_report": EventReportStorageSpec,
}
_FIELD_OF_SPEC = {spec: field for field, spec in _SPEC_OF_FIELD.items()}


def read(value_type: type[Value], message: Message) -> Value:
    """Return the model value with the fields of a message of the same field names.

    Raises:
        InvalidArgumentError: an enum has a number that is not one of its values.
    """
    kind: Any = value_type
    return value_type(**{name: convert(name, message) for name, convert in _readers(kind)})


@cache
def _readers(value_type: Any) -> tuple[tuple[str, Callable[[str, Any], Any]], ...]:
    hints = get_type_hints(value_type)
    return tuple((field.name, _field_reader(hints[field.name])) for field in dataclasses.fields(value_type))


def _field_reader(hint: Any) -> Callable[[str, Any], Any]:
    """From (name, message) to the value of the field of that name."""
    if isinstance(hint, UnionType):  # with None, for a field that has presence
        (inner,) = (_reader(member) for member in get_args(hint) if member is not NoneType)
        return lambda name, message: inner(name, _unwrapped(getattr(message, name))) if message.HasField(name) else None
    convert = _reader(hint)
    return lambda name, message: convert(name, getattr(message, name))


def _unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, Int64Value) else value


def _reader(hint: Any) -> Callable[[str, Any], Any]:
    if get_origin(hint) is tuple:
        inner = _reader(get_args(hint)[0])
        return lambda name, items: tuple(inner(name, item) for item in items)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return lambda _name, message: read(hint, message)
    if issubclass(hint, IntEnum):
        return lambda name, number: _enum(hint, name, number)
    return lambda _name, value: value


def _enum(enum: type[IntEnum], name: str, number: int) -> IntEnum:
    try:
        return enum(number)
    except ValueError:
        allowed = ", ".join(f"{member.name}={member.value}" for member in enum)
        raise InvalidArgumentError(f"{name} is {number}, allowed are {allowed}") from None


def fill(message: Any, value: Any) -> None:
    """Set the fields of a message from a model value of the same field names.

    Messages that were added to the original's and say nothing are left out, so that its clients get back over gRPC what
    they sent. JSON answers name every field that is no message, added ones, too.
    """
    names = _names_of(value.__class__)
    assert names is not None, value
    for name in names:
        item = getattr(value, name)
        if isinstance(item, tuple):
            _extend(getattr(message, name), item)
        elif _names_of(item.__class__) is not None:
            if not (_is_addition(message, name) and item == type(item)()):
                inner = getattr(message, name)
                inner.SetInParent()
                fill(inner, item)
        elif item is not None:
            _set(message, name, item)


def _set(message: Any, name: str, value: Any) -> None:
    if isinstance(wrapper := getattr(message, name), Int64Value):
        wrapper.SetInParent()  # a wrapped 0 is not the same as none
        wrapper.value = value
    else:
        setattr(message, name, value)


@cache
def _names_of(kind: Any) -> tuple[str, ...] | None:
    """Return the names of the fields of a dataclass, None for another type. An answer has thousands of values."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def _is_addition(message: Message, name: str) -> bool:
    return bool(message.DESCRIPTOR.fields_by_name[name].number >= _FIRST_ADDITION)


def _extend(repeated: Any, items: tuple[Any, ...]) -> None:
    for item in items:
        if _names_of(item.__class__) is not None:
            fill(repeated.add(), item)
        else:
            repeated.append(item)


def read_storage(api: str, message: Any) -> StorageConfig:
    """Return the storage of an AddStorage or UpdateStorage request.

    Raises:
        InvalidArgumentError: no storage, or no storage spec is set.
    """
    require(message.HasField("storage"), f"{api}.storage")
    return storage_of(message.storage)


def storage_of(config: Any) -> StorageConfig:
    """Return the storage that a StorageConfig message describes.

    Raises:
        InvalidArgumentError: no storage spec is set.
    """
    field = config.WhichOneof("storage_spec")
    require(field, "StorageConfig.storage_spec", f"is required, one of {sorted(_SPEC_OF_FIELD)}")
    spec = read(_SPEC_OF_FIELD[field], getattr(config, field))
    found = StorageConfig(
        config.global_unique_name,
        _with_defaults(spec) if isinstance(spec, EventReportStorageSpec) else spec,
        config.check_storage_available_when_open,
        capacity_bytes=config.capacity_bytes,
        used_percentage=config.used_percentage,
    )
    given = StorageType(_enum(StorageType, "storage_type", config.storage_type))
    # Of other types the spec says it; one that contradicts is kept for the check of the storage to refuse.
    return found if given is found.storage_type else dataclasses.replace(found, report_type=given)


def _with_defaults(spec: EventReportStorageSpec) -> EventReportStorageSpec:
    """Return a spec of a message, in which a time that was left out is 0."""
    given = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
    return EventReportStorageSpec(**{name: value for name, value in given.items() if value})


def write_storage(message: Any, config: StorageConfig) -> None:
    """Fill a StorageConfig message."""
    message.global_unique_name = config.global_unique_name
    message.check_storage_available_when_open = config.check_storage_available_when_open
    message.capacity_bytes = config.capacity_bytes
    message.used_percentage = config.used_percentage
    message.storage_type = config.storage_type
    spec = getattr(message, _FIELD_OF_SPEC[type(config.spec)])
    spec.SetInParent()
    fill(spec, config.spec)


def instance_of(request: Any) -> Instance:
    """Return the instance that a RegisterInstance request of either package describes.

    Raises:
        InvalidArgumentError: instance_group, instance_id or model_deployment is missing, or an enum is unknown.
    """
    require(request.instance_group, "RegisterInstance.instance_group")
    require(request.instance_id, "RegisterInstance.instance_id")
    require(request.HasField("model_deployment"), "RegisterInstance.model_deployment")
    hints = get_type_hints(Instance)
    parts = {
        name: _reader(hints[name])(name, getattr(request, name))
        for name in (
            "block_size",
            "location_spec_infos",
            "model_deployment",
            "location_spec_groups",
            "default_query_type",
        )
    }
    return Instance(
        quota_group_name="",
        instance_group_name=request.instance_group,
        instance_id=request.instance_id,
        **parts,
    )
