"""What callers on one node see of the storages: those of everybody, and the memory pools of their node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvcm.model.storages import StorageType
from kvcm.storage.backend import StorageBackend

__all__ = ["NodeView"]


class _Directory(Protocol):
    """What a view passes on."""

    @property
    def generation(self) -> int: ...

    def rank(self, storage: str) -> int | None: ...

    def takes_writes(self, storage: str) -> bool: ...

    def is_draining(self, storage: str) -> bool: ...

    def type_of(self, storage: str) -> StorageType | None: ...

    def backend(self, storage: str) -> StorageBackend | None: ...


class NodeView:
    """The storages as seen from somewhere. It follows every change of them.

    Args:
        directory: the open storages, as seen from a node without memory of its own.
        pools: ranks of the available memory pools that are seen, too.
    """

    def __init__(self, directory: _Directory, pools: Mapping[str, int]) -> None:
        self._directory = directory
        self._pools = pools

    @property
    def generation(self) -> int:
        """Grows with every change of any storage."""
        return self._directory.generation

    def rank(self, storage: str) -> int | None:
        """Return the speed rank of a storage (lower is faster), None while it is not available here."""
        rank = self._directory.rank(storage)
        return self._pools.get(storage) if rank is None else rank

    def takes_writes(self, storage: str) -> bool:
        """Return whether a new block can be expected to find room on a storage."""
        return self._directory.takes_writes(storage)

    def is_draining(self, storage: str) -> bool:
        """Return whether a storage is being emptied, so that nothing new may go there."""
        return self._directory.is_draining(storage)

    def type_of(self, storage: str) -> StorageType | None:
        """Return the type of an open storage, None when there is none of that name."""
        return self._directory.type_of(storage)

    def backend(self, storage: str) -> StorageBackend | None:
        """Return an open storage, enabled or not; None when there is none of that name."""
        return self._directory.backend(storage)
