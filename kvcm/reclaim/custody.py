"""What the deletion executor asks of those who know the indexes and the storages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from kvcm.index.meta_index import MetaIndex
from kvcm.model.deletion import DeletionItem
from kvcm.model.instances import Instance
from kvcm.storage.backend import StorageBackend

__all__ = ["Custodian", "IndexInCustody", "StorageFinder"]


class StorageFinder(Protocol):
    """Finds open storages."""

    def backend(self, storage: str) -> StorageBackend | None:
        """Return an open storage, None when there is none of that name."""


class IndexInCustody(Protocol):
    """An index and whose it is."""

    @property
    def instance(self) -> Instance: ...

    @property
    def instance_id(self) -> str: ...

    @property
    def uid(self) -> int: ...

    @property
    def meta_index(self) -> MetaIndex: ...


class Custodian(Protocol):
    """Knows the indexes, the writers and the readers."""

    def indexes(self) -> Iterable[IndexInCustody]:
        """Return the index of every instance, also of those that are being removed."""

    def delay_seconds(self, instance: Instance) -> float:
        """Return how long what served stays readable for those who were given it."""

    async def end_writers(self, uid: int, overdue: Mapping[str, Sequence[int]]) -> None:
        """End write sessions that left these blocks writing past their deadline."""

    async def held_until(self, items: Sequence[DeletionItem]) -> list[float]:
        """Return per item the unix time until which its bytes must stay, 0 when they need not."""
