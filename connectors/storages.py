"""Reads `storage_configs` of a registration: the JSON list of the group's storages (wire.md 4.4)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import (
    DummyStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageSpec,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)

__all__ = ["read_storage_configs"]

_T = TypeVar("_T")

_SPECS: dict[str, type[StorageSpec]] = {
    "file": NfsStorageSpec,
    "hf3fs": ThreeFSStorageSpec,
    "vcns_hf3fs": VcnsThreeFSStorageSpec,
    "mooncake": MooncakeStorageSpec,
    "pace": TairMemPoolStorageSpec,
    "dummy": DummyStorageSpec,
}
# JSON documents spell this key differently from the messages.
_JSON_NAMES = {"master_service_entry": "master_server_entry"}


def read_storage_configs(text: str) -> tuple[StorageConfig, ...]:
    """Return the storages of the list; kinds that this release does not know are left out.

    Args:
        text: as the manager answered it; "" is an empty list.

    Raises:
        InvalidArgumentError: not a list of storage configs.
    """
    try:
        entries = json.loads(text or "[]")
    except ValueError as error:
        raise InvalidArgumentError(f"storage_configs is not JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidArgumentError("storage_configs is not a list of objects")
    return tuple(_storage(entry) for entry in entries if entry.get("type") in _SPECS)


def _storage(entry: Mapping[str, object]) -> StorageConfig:
    spec = entry.get("storage_spec", {})
    if not isinstance(spec, dict):
        raise InvalidArgumentError(f"storage_spec is {spec!r}, must be an object")
    return StorageConfig(
        _typed(entry, "global_unique_name", str, ""),
        _spec(_SPECS[_typed(entry, "type", str, "")], spec),
        is_available=_typed(entry, "is_available", bool, True),
    )


def _spec(spec_class: type[StorageSpec], values: Mapping[str, object]) -> StorageSpec:
    defaults: dict[str, Any] = {field.name: field.default for field in fields(spec_class)}
    read = {
        name: _typed(values, _JSON_NAMES.get(name, name), type(default), default) for name, default in defaults.items()
    }
    return spec_class(**read)


def _typed(values: Mapping[str, object], name: str, kind: type[_T], default: _T) -> _T:
    value = values.get(name, default)
    if type(value) is not kind:
        raise InvalidArgumentError(f"{name} is {value!r}, must be of type {kind.__name__}")
    return value
