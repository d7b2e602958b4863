"""What may become of a storage's config, and what of it has to be opened."""

from __future__ import annotations

from dataclasses import replace

from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError, NotReadyError
from kvcm.model.storages import StorageConfig, TairMemPoolStorageSpec

__all__ = ["existing_storage", "limit_of", "medium_of", "refuse_another_kind", "refuse_taken"]


def medium_of(config: StorageConfig) -> StorageConfig:
    """Return what has to be opened: switches and limit make no difference."""
    return replace(config, is_available=True, capacity_bytes=0, used_percentage=0.0, draining_since=0.0)


def limit_of(config: StorageConfig) -> tuple[int, float]:
    """Return what can be changed without opening anything."""
    return config.capacity_bytes, config.used_percentage


def refuse_taken(config: StorageConfig, known: StorageConfig | None) -> None:
    """Refuse to add a storage whose name is taken.

    Raises:
        DuplicateEntityError: the name is taken.
        NotReadyError: a storage of that name and another medium is still to be forgotten.
    """
    name = config.global_unique_name
    if known is not None and not known.is_removed:
        raise DuplicateEntityError(f"storage {name!r} exists; use UpdateStorage to change it")
    if known is not None and known.spec != config.spec:
        raise NotReadyError(
            f"storage {name!r} is being forgotten, there are still blocks that lay on it: until ListDrain names it no "
            "more it can only be added with the medium that it had; try again, or take another name"
        )


def refuse_another_kind(config: StorageConfig, known: StorageConfig) -> None:
    """Refuse to make another thing of a storage than it is.

    Raises:
        InvalidArgumentError: its type would change, or the memory of a pool.
    """
    if config.storage_type is not known.storage_type:
        raise InvalidArgumentError(
            f"storage {config.global_unique_name!r} is of type {known.storage_type.kind} and holds blocks of "
            f"that: to make it {config.storage_type.kind}, remove it and add it again"
        )
    _refuse_another_pool(config, known)


def _refuse_another_pool(config: StorageConfig, known: StorageConfig) -> None:
    """The memory of a pool is divided by its size, and addresses in it name its node."""
    if not isinstance(config.spec, TairMemPoolStorageSpec) or not isinstance(known.spec, TairMemPoolStorageSpec):
        return
    before, wanted = ((spec.node_id, spec.capacity_bytes) for spec in (known.spec, config.spec))
    if before != wanted:
        raise InvalidArgumentError(
            f"storage {config.global_unique_name!r} is a pool of {before[1]} bytes on node {before[0]!r}, wanted are "
            f"{wanted[1]} bytes on node {wanted[0]!r}: to change that, remove it and add it again"
        )


def existing_storage(name: str, known: StorageConfig | None) -> StorageConfig:
    """Return a storage that is there.

    Raises:
        InvalidArgumentError: there is no such storage.
    """
    if known is None or known.is_removed:
        raise InvalidArgumentError(f"storage {name!r} does not exist")
    return known
