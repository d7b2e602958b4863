"""Documents of the registry's table: JSON with a version number, made from the frozen values of the model."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from kvcm.model.accounts import Account
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.storages import (
    DummyStorageSpec,
    LocalStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)

__all__ = ["decode_document", "encode_document"]

_VERSION = 1  # grows with every change that an older release could not read or would lose
# Of a storage that is drained or removed, which an older release would take for any other, and of an account without a
# password, which it could not read.
_VERSION_OF_SPECIAL = 2

Value = TypeVar("Value")

_SPECS: dict[str, type[Any]] = {
    spec.__name__: spec
    for spec in (
        LocalStorageSpec,
        ThreeFSStorageSpec,
        VcnsThreeFSStorageSpec,
        MooncakeStorageSpec,
        TairMemPoolStorageSpec,
        NfsStorageSpec,
        DummyStorageSpec,
    )
}


class _Document(msgspec.Struct):
    version: int
    value: msgspec.Raw


class _Storage(msgspec.Struct):
    """A StorageConfig whose spec says its class: unions of plain dataclasses carry no tag."""

    global_unique_name: str
    spec_type: str
    spec: msgspec.Raw
    check_storage_available_when_open: bool
    is_available: bool
    capacity_bytes: int = 0
    used_percentage: float = 0.0
    draining_since: float | msgspec.UnsetType = msgspec.UNSET
    removed_at: float | msgspec.UnsetType = msgspec.UNSET


def encode_document(value: object) -> bytes:
    """Print a value of the model; equal values give equal bytes, bytes become base64.

    Raises:
        InvalidArgumentError: a text is not valid UTF-8.
    """
    try:
        shape = _storage_document(value) if isinstance(value, StorageConfig) else value
        return msgspec.json.encode(_Document(_version_of(value), msgspec.Raw(msgspec.json.encode(shape))))
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"a text is not valid UTF-8: {error.object[error.start : error.end]!r}") from error


def decode_document(kind: type[Value], document: bytes) -> Value:
    """Read a value of class `kind`.

    Raises:
        StorageIOError: the document is damaged, or of a version that this release does not know.
    """
    try:
        outer = msgspec.json.decode(document, type=_Document)
        known = {_VERSION, _VERSION_OF_SPECIAL} if kind in (StorageConfig, Account) else {_VERSION}
        if outer.version not in known:
            raise StorageIOError(
                f"document of version {outer.version}, this release reads version {max(known)}: "
                "it was written by another release, run that one"
            )
        value: Any = _storage(outer.value) if kind is StorageConfig else msgspec.json.decode(outer.value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageIOError(f"document is damaged: {error}") from error
    else:
        decoded: Value = value
        return decoded


def _version_of(value: object) -> int:
    is_leaving = isinstance(value, StorageConfig) and (value.is_draining or value.is_removed)
    is_locked = isinstance(value, Account) and value.password is None
    return _VERSION_OF_SPECIAL if is_leaving or is_locked else _VERSION


def _storage_document(config: StorageConfig) -> _Storage:
    return _Storage(
        config.global_unique_name,
        type(config.spec).__name__,
        msgspec.Raw(msgspec.json.encode(config.spec)),
        config.check_storage_available_when_open,
        config.is_available,
        config.capacity_bytes,
        config.used_percentage,
        config.draining_since or msgspec.UNSET,
        config.removed_at or msgspec.UNSET,
    )


def _time(stored: float | msgspec.UnsetType) -> float:
    return 0.0 if isinstance(stored, msgspec.UnsetType) else stored


def _storage(value: msgspec.Raw) -> StorageConfig:
    stored = msgspec.json.decode(value, type=_Storage)
    spec_type = _SPECS.get(stored.spec_type)
    if spec_type is None:
        raise StorageIOError(f"document names storage spec {stored.spec_type!r}, this release knows {sorted(_SPECS)}")
    return StorageConfig(
        stored.global_unique_name,
        msgspec.json.decode(stored.spec, type=spec_type),
        stored.check_storage_available_when_open,
        stored.is_available,
        stored.capacity_bytes,
        stored.used_percentage,
        _time(stored.draining_since),
        _time(stored.removed_at),
    )
