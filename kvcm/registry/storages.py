"""The configured storages. A storage that does not open is refused and not stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError
from kvcm.model.storages import StorageConfig
from kvcm.registry.validation import check_storage

__all__ = ["StorageOpener", "StorageRegistry"]


class StorageOpener(Protocol):
    """Opens and closes storages; the registry decides which."""

    def prepare(self, config: StorageConfig) -> Any:
        """Open a storage's medium, which may block, and change nothing else; raises KvcmError if it cannot."""

    def install(self, config: StorageConfig, prepared: Any) -> None:
        """Put what was prepared in place of an open storage of that name."""

    def set_enabled(self, name: str, *, enabled: bool) -> None:
        """Make an open storage available for reads and writes, or not."""

    def close(self, name: str) -> None:
        """Close a storage."""


class StorageRegistry:
    """Storages by their unique name.

    Args:
        opener: opens what is added.
    """

    def __init__(self, opener: StorageOpener) -> None:
        self._opener = opener
        self._configs: dict[str, StorageConfig] = {}

    def add(self, config: StorageConfig) -> None:
        """Add and open a storage, before the manager serves: opening its medium blocks.

        Raises:
            InvalidArgumentError: a field is missing or malformed.
            DuplicateEntityError: the name is taken.
            KvcmError: it cannot be opened.
        """
        self._check_new(config)
        self._install(config, self._opener.prepare(config))

    async def add_while_serving(self, config: StorageConfig) -> None:
        """Do `add` without holding up other requests."""
        self._check_new(config)
        prepared = await asyncio.to_thread(self._opener.prepare, config)
        self._check_new(config)  # somebody may have added it meanwhile
        self._install(config, prepared)

    def update(self, config: StorageConfig) -> None:
        """Replace a storage's config; the old one stays in force when the new one cannot be opened. Blocks as `add`.

        Raises:
            InvalidArgumentError: a field is malformed, or there is no such storage.
            KvcmError: it cannot be opened.
        """
        check_storage(config)
        self._known(config.global_unique_name)
        self._replace(config, self._opener.prepare(config))

    async def update_while_serving(self, config: StorageConfig) -> None:
        """Do `update` without holding up other requests."""
        check_storage(config)
        self._known(config.global_unique_name)
        self._replace(config, await asyncio.to_thread(self._opener.prepare, config))

    def _check_new(self, config: StorageConfig) -> None:
        check_storage(config)
        if config.global_unique_name in self._configs:
            raise DuplicateEntityError(f"storage {config.global_unique_name!r} exists; use UpdateStorage to change it")

    def _replace(self, config: StorageConfig, prepared: Any) -> None:
        known = self._known(config.global_unique_name)
        if config.storage_type is not known.storage_type:
            raise InvalidArgumentError(
                f"storage {config.global_unique_name!r} is of type {known.storage_type.kind} and holds blocks of that: "
                f"to make it {config.storage_type.kind}, remove it and add it again"
            )
        self._install(replace(config, is_available=known.is_available), prepared)

    def _install(self, config: StorageConfig, prepared: Any) -> None:
        self._opener.install(config, prepared)
        self._configs[config.global_unique_name] = config

    def set_enabled(self, name: str, *, enabled: bool) -> None:
        """Make a storage available for reads and writes, or not.

        Raises:
            InvalidArgumentError: there is no such storage.
        """
        self._configs[name] = replace(self._known(name), is_available=enabled)
        self._opener.set_enabled(name, enabled=enabled)

    def remove(self, name: str) -> None:
        """Forget a storage; its locations count as missing from now on.

        Raises:
            InvalidArgumentError: there is no such storage.
        """
        self._known(name)
        del self._configs[name]
        self._opener.close(name)

    def all(self) -> list[StorageConfig]:
        """Return all storages, ordered by name."""
        return [self._configs[name] for name in sorted(self._configs)]

    def existing(self, names: Iterable[str]) -> list[StorageConfig]:
        """Return those of `names` that exist, ordered by name."""
        return [self._configs[name] for name in sorted(set(names)) if name in self._configs]

    def _known(self, name: str) -> StorageConfig:
        try:
            return self._configs[name]
        except KeyError:
            raise InvalidArgumentError(f"storage {name!r} does not exist") from None
