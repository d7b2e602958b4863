"""Documents of the registry's table: JSON with a version number, made from the frozen values of the model."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

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


def encode_document(value: object) -> bytes:
    """Print a value of the model; equal values give equal bytes, bytes become base64.

    Raises:
        InvalidArgumentError: a text is not valid UTF-8.
    """
    try:
        shape = _storage_document(value) if isinstance(value, StorageConfig) else value
        return msgspec.json.encode(_Document(_VERSION, msgspec.Raw(msgspec.json.encode(shape))))
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"a text is not valid UTF-8: {error.object[error.start : error.end]!r}") from error


def decode_document(kind: type[Value], document: bytes) -> Value:
    """Read a value of class `kind`.

    Raises:
        StorageIOError: the document is damaged, or of a version that this release does not know.
    """
    try:
        outer = msgspec.json.decode(document, type=_Document)
        if outer.version != _VERSION:
            raise StorageIOError(
                f"document of version {outer.version}, this release reads version {_VERSION}: "
                "it was written by another release, run that one"
            )
        value: Any = _storage(outer.value) if kind is StorageConfig else msgspec.json.decode(outer.value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageIOError(f"document is damaged: {error}") from error
    else:
        decoded: Value = value
        return decoded


def _storage_document(config: StorageConfig) -> _Storage:
    return _Storage(
        config.global_unique_name,
        type(config.spec).__name__,
        msgspec.Raw(msgspec.json.encode(config.spec)),
        config.check_storage_available_when_open,
        config.is_available,
        config.capacity_bytes,
        config.used_percentage,
    )


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
    )
