"""The limits that a group stands at, and which of its storages take its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcm.model.groups import InstanceGroup
from kvcm.service.alerts.values import Facts
from kvcm.service.alerts.wording import counted, percent
from kvcm.service.usage_values import NOT_LIMITED, GroupUsage, StorageStatus, Usage
from kvcm.sizes import shown_size
from kvcm.storage.health import HealthState

__all__ = ["FULL", "OWN_MARK", "Limit", "limits_of", "storage_trouble"]

OWN_MARK = "trigger_strategy.used_percentage of the group"
"""The setting of a group from which on its blocks leave."""

FULL = 0.98
"""Ratio of a limit from which on it is taken for reached: what is left may be less than one write needs."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit that a group stands at.

    Attributes:
        what: names it.
        usage: how far it is used; in blocks for key limits.
        raised_by: what to change to raise it.
        counts_blocks: whether it is one of blocks.
        others: bytes of it that other groups use.
        mark: the setting from which on blocks leave because of it; "" for none.
    """

    what: str
    usage: Usage
    raised_by: str
    counts_blocks: bool = False
    others: int = 0
    mark: str = OWN_MARK

    @property
    def ratio(self) -> float:
        """How far it is used."""
        return self.usage.used_bytes / self.usage.capacity_bytes if self.usage.capacity_bytes > 0 else 1.0

    @property
    def is_full(self) -> bool:
        """Whether it is reached."""
        return self.ratio >= FULL

    @property
    def text(self) -> str:
        """The limit with its numbers, as a clause."""
        used, capacity = self.usage.used_bytes, self.usage.capacity_bytes
        numbers = f"{shown_size(used)} of {shown_size(capacity)}"
        if self.counts_blocks:
            numbers = f"{used:,} of {counted(capacity, 'block')}"
        return f"{self.what} is {percent(used, capacity)} used ({numbers})"


def limits_of(facts: Facts, group: GroupUsage, configured: InstanceGroup) -> Sequence[Limit]:
    """Return the limits of a group, the one that it comes closest to first."""
    found = [Limit("its quota", group.total, "the group's quota (quota.capacity)")]
    found += _of_keys(group, configured)
    found += _of_global_quotas(facts, group)
    found += _of_storages(facts, group, configured)
    return sorted(found, key=lambda limit: -limit.ratio)


def _of_keys(group: GroupUsage, configured: InstanceGroup) -> Iterator[Limit]:
    trigger = configured.cache_config.reclaim_strategy.trigger_strategy.used_percentage
    for index in group.instances:
        if index.max_key_count > 0:
            mark = int(index.max_key_count * trigger) if 0 < trigger <= 1 else NOT_LIMITED
            usage = Usage(index.key_count, 0, index.max_key_count, mark, mark)
            what = f"the key limit of instance {index.instance_id}"
            raised_by = "meta_indexer_config.max_key_count of the group"
            yield Limit(what, usage, raised_by, counts_blocks=True)


def _of_global_quotas(facts: Facts, group: GroupUsage) -> Iterator[Limit]:
    for quota in facts.usage.global_quotas:
        if group.name in quota.groups and quota.usage.capacity_bytes >= 0:
            others = max(0, quota.usage.used_bytes - group.total.used_bytes)
            what = f"the global quota {quota.name}"
            raised_by, mark = f"kvcm quota set {quota.name}", f"the mark of the global quota {quota.name}"
            yield Limit(what, quota.usage, raised_by, others=others, mark=mark)


def _of_storages(facts: Facts, group: GroupUsage, configured: InstanceGroup) -> Iterator[Limit]:
    """Yield what limits the group on its roomiest storage: while one has room, no other limits it."""
    usable = [name for name in configured.storage_candidates if not storage_trouble(facts.storages.get(name))]
    tightest = [max(_on_storage(facts, group, name), key=lambda limit: limit.ratio, default=None) for name in usable]
    limits = [limit for limit in tightest if limit is not None]
    if limits and len(limits) == len(tightest):
        yield min(limits, key=lambda limit: limit.ratio)


def _on_storage(facts: Facts, group: GroupUsage, name: str) -> Iterator[Limit]:
    for storage in facts.usage.storages:
        if storage.storage_unique_name == name and storage.usage.capacity_bytes >= 0:
            own = next((each.used_bytes for each in group.storages if each.storage_unique_name == name), 0)
            others = max(0, storage.usage.used_bytes - own)
            raised_by, mark = f"capacity_bytes of storage {name}", f"used_percentage of storage {name}"
            yield Limit(f"storage {name}", storage.usage, raised_by, others=others, mark=mark)
    for each in group.types:
        if each.storage_type is facts.types.get(name) and each.usage.capacity_bytes >= 0:
            what = f"its quota for storages of type {each.storage_type.kind}"
            yield Limit(what, each.usage, "quota.quota_config of the group")
    what = f"the medium of storage {name}"
    medium = Limit(what, _medium(facts.storages.get(name)), what, mark="")
    if medium.usage.capacity_bytes > 0 and medium.is_full:  # others may have filled it
        yield medium


def _medium(status: StorageStatus | None) -> Usage:
    if status is None or status.medium_free_bytes < 0:
        return Usage(0, 0)
    return Usage(status.medium_bytes - status.medium_free_bytes, 0, status.medium_bytes)


def storage_trouble(status: StorageStatus | None) -> str:
    """Return why a storage takes no blocks, as the end of a clause that begins with its name; "" where it does."""
    if status is None:
        return "is not configured"
    if not status.is_enabled:
        return "is disabled"
    if status.health is HealthState.SH_DOWN:
        return f"is down ({status.reason})" if status.reason else "is down"
    return "is being drained" if status.is_draining else ""
