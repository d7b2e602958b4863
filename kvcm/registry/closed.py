"""For tools that read and change the registry without touching the storages that it names."""

from __future__ import annotations

from kvcm.model.storages import StorageConfig

__all__ = ["ClosedStorages"]


class ClosedStorages:
    """Opens nothing: takes the place of the storage directory where no bytes are read, written or deleted.

    Attributes:
        generation: never changes, as no storage becomes available.
    """

    generation = 0

    def prepare(self, config: StorageConfig, *, is_new: bool) -> None:
        """Open nothing."""

    async def prepare_in_thread(self, config: StorageConfig, *, is_new: bool) -> None:
        """Open nothing."""

    def discard(self, prepared: None) -> None:
        """Nothing was prepared."""

    def install(self, config: StorageConfig, prepared: None) -> None:
        """Keep nothing open."""

    def set_enabled(self, name: str, *, enabled: bool) -> None:
        """Nothing is open that could be switched."""

    def set_draining(self, name: str, *, is_draining: bool) -> None:
        """Nothing is open that could take writes."""

    def close(self, name: str) -> None:
        """Nothing is open that could be closed."""

    def rank(self, storage: str) -> int | None:
        """Return None: no storage can be read here."""
        return None
