"""Which storages a group's writes may go to, best first (wire.md 5.6)."""

from __future__ import annotations

from typing import Protocol

from kvcm.index.answers import StorageView
from kvcm.model.groups import InstanceGroup
from kvcm.model.locations import Place
from kvcm.model.storages import StorageType
from kvcm.storage.backend import StorageBackend

__all__ = ["NodeStorages", "Storages", "candidates"]


class Storages(StorageView, Protocol):
    """The open storages."""

    def takes_writes(self, storage: str) -> bool:
        """Return whether a new block can be expected to find room on a storage."""

    def is_draining(self, storage: str) -> bool:
        """Return whether a storage is being emptied, so that nothing new may go there."""

    def type_of(self, storage: str) -> StorageType | None:
        """Return the type of an open storage, None when there is none of that name."""

    def backend(self, storage: str) -> StorageBackend | None:
        """Return an open storage, enabled or not; None when there is none of that name."""


class NodeStorages(Storages, Protocol):
    """The open storages as callers see them that name no node; memory of single nodes is not among them."""

    def for_node(self, node_id: str) -> Storages:
        """Return the storages as callers on a node see them: with the memory pools of that node."""

    @property
    def everywhere(self) -> Storages:
        """The storages as operators see them: with the memory pools of all nodes."""

    def note_unwritable(self, name: str) -> None:
        """Expect no room on an open storage until a probe is answered: somebody was refused a moment ago."""


def candidates(group: InstanceGroup, storages: Storages) -> list[Place]:
    """Return the group's available storages in order of preference, without those that are being drained.

    Candidates that are not registered count as absent. A strategy that names a type puts that type first, or allows
    nothing else; within equals the group's own order holds. What takes no bytes now, full or mounted read-only, comes
    last: should all be so, then one that was emptied a moment ago is tried.
    """
    available = [
        Place(name, storage_type)
        for name in group.storage_candidates
        if storages.rank(name) is not None
        and not storages.is_draining(name)
        and (storage_type := storages.type_of(name)) is not None
    ]
    strategy = group.cache_config.data_storage_strategy
    if strategy.is_exclusive:
        available = [candidate for candidate in available if candidate.storage_type is strategy.preferred_type]
    return sorted(
        available,
        key=lambda each: (not storages.takes_writes(each.storage), each.storage_type is not strategy.preferred_type),
    )
