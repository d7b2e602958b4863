"""What instances hold, without what is already being deleted, and the sums of it by group.

A look asks again after every batch that it marked; mostly nothing else has changed by then, nor from one look to the
next. So what is known of an index is kept until that is changed; of an index that other managers change, too, nothing
is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcm.index.meta_index import MetaIndex
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.locations import Place
from kvcm.model.storages import StorageType
from kvcm.reclaim.custody import IndexInCustody

__all__ = ["GroupHoldings", "Holding", "Holdings", "Wanted"]

Wanted = Callable[[Place], bool]
"""Whether what lies at a place helps."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one instance holds, without what is already being deleted.

    Attributes:
        uid: number of its registration.
        instance: the registration.
        group: its group, as it is configured now.
        remaining: bytes by place.
        keys: blocks.
        max_keys: most blocks that it may have.
    """

    uid: int
    instance: Instance
    group: InstanceGroup
    remaining: Mapping[Place, int]
    keys: int
    max_keys: int

    @classmethod
    def of(cls, custody: IndexInCustody, group: InstanceGroup) -> Holding:
        """Return what an index of a group holds now."""
        index = custody.meta_index
        deleting = index.deleting_bytes
        remaining = {place: size - deleting.get(place, 0) for place, size in index.usage_bytes.items()}
        keys = index.key_count - index.deleting_keys
        max_keys = group.cache_config.meta_indexer_config.max_key_count  # the index hears of it at the next write
        return cls(custody.uid, custody.instance, group, remaining, keys, max_keys)

    def bytes(self, wanted: Wanted) -> int:
        """Return the bytes at wanted places."""
        return sum(size for place, size in self.remaining.items() if wanted(place))


class GroupHoldings(NamedTuple):
    """What the instances of one group hold together.

    Attributes:
        group: as it is configured now.
        members: what each of them holds.
        largest_block: bytes of the largest block of any of them.
        total: bytes.
        by_type: bytes by storage type.
        by_storage: bytes by storage.
    """

    group: InstanceGroup
    members: Sequence[Holding]
    largest_block: int
    total: int
    by_type: Mapping[StorageType, int]
    by_storage: Mapping[str, int]

    @classmethod
    def of(cls, members: Sequence[Holding]) -> GroupHoldings:
        """Return the sums over one or more instances of one group."""
        by_type: dict[StorageType, int] = {}
        by_storage: dict[str, int] = {}
        total = 0
        for holding in members:
            for (storage, storage_type), size in holding.remaining.items():
                by_type[storage_type] = by_type.get(storage_type, 0) + size
                by_storage[storage] = by_storage.get(storage, 0) + size
                total += size
        largest = max(holding.instance.block_bytes for holding in members)
        return cls(members[0].group, members, largest, total, by_type, by_storage)


class _Known(NamedTuple):
    """A holding, and the index as it was when that was looked at."""

    meta_index: MetaIndex
    generation: int
    holding: Holding

    def is_of(self, index: MetaIndex, group: InstanceGroup) -> bool:
        """Return whether it holds for an index of a group as both are now."""
        return self.generation == index.generation and self.meta_index is index and self.holding.group is group


class Holdings:
    """Looks at what indexes hold, and remembers it."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, custodies: Iterable[tuple[IndexInCustody, InstanceGroup]]) -> list[Holding]:
        """Return what each index holds now; of what did not change the very same object as before.

        Args:
            custodies: all indexes, each with its group: what is left out is forgotten.
        """
        known, self._known = self._known, {}
        return [self._of(custody, group, known.get(custody.uid)) for custody, group in custodies]

    def _of(self, custody: IndexInCustody, group: InstanceGroup, known: _Known | None) -> Holding:
        index = custody.meta_index
        if known is None or not known.is_of(index, group):
            known = _Known(index, index.generation, Holding.of(custody, group))
        if not index.is_shared:
            self._known[custody.uid] = known
        return known.holding
