"""Whether a write has left its group above a mark: what wakes the reclaimer before its time.

It goes by what the ledger knows, which counts what is being deleted: it may wake the reclaimer once too often, never
too seldom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvcm.model.groups import InstanceGroup
from kvcm.model.locations import Place
from kvcm.reclaim.needs import Limits
from kvcm.reclaim.watermarks import Mark, global_mark, group_mark, key_mark, size_mark, storage_mark, type_mark

__all__ = ["Blocks", "Used", "is_above_a_mark"]


class Used(Protocol):
    """Keeps count of groups."""

    def used(self, group_name: str) -> Mapping[Place, int]:
        """Return the bytes that a group uses by place."""

    def storage_used(self, storage: str) -> int:
        """Return the bytes that all groups use on a storage."""

    def used_on(self, group_name: str, storage: str) -> int:
        """Return the bytes that a group uses on a storage."""


class Blocks(NamedTuple):
    """The blocks of one instance.

    Attributes:
        size_bytes: of a whole one.
        key_count: how many there are.
    """

    size_bytes: int
    key_count: int


def is_above_a_mark(group: InstanceGroup, used: Used, limits: Limits, blocks: Sequence[Blocks]) -> bool:
    """Return whether usage is above a mark that concerns a group.

    Args:
        group: that has just written.
        used: what groups use.
        limits: above the groups.
        blocks: of each of its instances.
    """
    block = max((each.size_bytes for each in blocks), default=0)
    return any(amount > mark.high for mark, amount in _marks(group, used, limits, blocks, block) if mark is not None)


def _marks(
    group: InstanceGroup, used: Used, limits: Limits, blocks: Sequence[Blocks], block: int
) -> Iterator[tuple[Mark | None, int]]:
    by_place = used.used(group.name)
    total = sum(by_place.values())
    yield group_mark(group, block), total
    yield size_mark(group), total
    for kind in {place.storage_type for place in by_place}:
        on_type = sum(size for place, size in by_place.items() if place.storage_type is kind)
        yield type_mark(group, kind, block), on_type
    max_keys = group.cache_config.meta_indexer_config.max_key_count
    for each in blocks:
        yield key_mark(group, max_keys), each.key_count
    for storage in limits.storages:
        name = storage.global_unique_name
        if storage.capacity_bytes and name in group.storage_candidates:
            by_group = {each.name: used.used_on(each.name, name) for each in limits.groups}
            yield storage_mark(storage, block), used.storage_used(name) + limits.kept_on(name, by_group)
    for quota in limits.quotas:
        if quota.name == group.global_quota_group_name:
            drawing = [each.name for each in limits.groups if each.global_quota_group_name == quota.name]
            yield global_mark(quota, block), sum(sum(used.used(name).values()) for name in drawing)
