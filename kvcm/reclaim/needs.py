"""Reclaim needs: how much must be evicted, and from which instances, by usage and the watermarks of every level.

Locations being deleted count as gone: otherwise the delay before a deletion would let every round evict the same amount
again. Levels are checked from the narrow to the wide: a watermark crossed on one storage type evicts that type only,
and those evictions count for the total of the group, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

from kvcm.index.meta_index import IndexHandle, MetaIndex
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.locations import Location, StorageKey
from kvcm.model.storages import StorageConfig, StorageType
from kvcm.reclaim.watermarks import (
    Watermark,
    global_watermark,
    group_watermark,
    key_watermark,
    size_watermark,
    storage_watermark,
    type_watermark,
)
from kvcm.registry.registry import Registry

__all__ = [
    "GroupUsage",
    "InstanceUsage",
    "Label",
    "Limits",
    "PlaceFilter",
    "Reason",
    "ReclaimNeed",
    "UsageReader",
    "WatermarkCheck",
    "needs",
]

# Usage of instances, without locations being deleted, and sums by group.
#
# A round recomputes it after every batch; mostly nothing else has changed by then. So the usage of an index is cached
# until the index changes; of an index that other managers change, too, nothing is cached.

PlaceFilter = Callable[[StorageKey], bool]
"""Whether what lies at a place helps."""


@dataclass(frozen=True, slots=True)
class InstanceUsage:
    """Usage of one instance, without locations being deleted.

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
    remaining: Mapping[StorageKey, int]
    keys: int
    max_keys: int

    @classmethod
    def of(cls, handle: IndexHandle, group: InstanceGroup) -> InstanceUsage:
        """Return what an index of a group holds now."""
        index = handle.meta_index
        deleting = index.deleting_bytes
        remaining = {place: size - deleting.get(place, 0) for place, size in index.usage_bytes.items()}
        keys = index.key_count - index.deleting_keys
        # the index gets the new limit at the next write
        max_keys = group.cache_config.meta_indexer_config.max_key_count
        return cls(handle.uid, handle.instance, group, remaining, keys, max_keys)

    def bytes(self, wanted: PlaceFilter) -> int:
        """Return the bytes at wanted places."""
        return sum(size for place, size in self.remaining.items() if wanted(place))


class GroupUsage(NamedTuple):
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
    members: Sequence[InstanceUsage]
    largest_block: int
    total: int
    by_type: Mapping[StorageType, int]
    by_storage: Mapping[str, int]

    @classmethod
    def of(cls, members: Sequence[InstanceUsage]) -> GroupUsage:
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


class _CachedUsage(NamedTuple):
    """A holding, and the index as it was when that was looked at."""

    meta_index: MetaIndex
    generation: int
    holding: InstanceUsage

    def is_of(self, index: MetaIndex, group: InstanceGroup) -> bool:
        """Return whether it holds for an index of a group as both are now."""
        return self.generation == index.generation and self.meta_index is index and self.holding.group is group


class UsageReader:
    """Looks at what indexes hold, and remembers it."""

    def __init__(self) -> None:
        self._known: dict[int, _CachedUsage] = {}

    def of(self, handles: Iterable[tuple[IndexHandle, InstanceGroup]]) -> list[InstanceUsage]:
        """Return what each index holds now; of what did not change the very same object as before.

        Args:
            handles: all indexes, each with its group; the cache forgets the others.
        """
        known, self._known = self._known, {}
        return [self._of(handle, group, known.get(handle.uid)) for handle, group in handles]

    def _of(self, handle: IndexHandle, group: InstanceGroup, known: _CachedUsage | None) -> InstanceUsage:
        index = handle.meta_index
        if known is None or not known.is_of(index, group):
            known = _CachedUsage(index, index.generation, InstanceUsage.of(handle, group))
        if not index.is_shared:
            self._known[handle.uid] = known
        return known.holding


class Reason(Enum):
    """Level of the watermark that was crossed."""

    TYPE = "type"
    STORAGE = "storage"
    MEDIUM = "medium"
    KEYS = "keys"
    SIZE = "size"
    GROUP = "group"
    GLOBAL = "global"
    TTL = "ttl"


class Limits(NamedTuple):
    """The limits above the groups, and all groups.

    Attributes:
        media: by storage whose medium is full, the bytes that may remain on it.
    """

    storages: Sequence[StorageConfig]
    quotas: Sequence[GlobalQuota]
    groups: Sequence[InstanceGroup] = ()
    media: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class ReclaimNeed:
    """Something that has to go.

    Attributes:
        reason: level of the crossed watermark.
        amount: bytes, or blocks where `counts_blocks`.
        filter: places whose bytes help.
        usages: from whose instances it may be taken.
        name: of the group, type, storage, instance or global quota its level.
        payer: the group that gives, where several could.
        counts_blocks: whether the amount is blocks.
    """

    reason: Reason
    amount: int
    filter: PlaceFilter
    usages: Sequence[InstanceUsage]
    name: str
    payer: str = ""
    counts_blocks: bool = False

    @property
    def label(self) -> Label:
        """Names the watermark."""
        return self.reason, self.name

    @property
    def blocks(self) -> int:
        """How many blocks serve it, about."""
        if self.counts_blocks:
            return self.amount
        return -(-self.amount // max(1, self.block_bytes))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the instance with the smallest ones."""
        return min(holding.instance.block_bytes for holding in self.usages)

    def size_of(self, location: Location) -> int:
        """Return how many bytes of the need the end of a location serves."""
        return location.size_bytes if self.filter(location.place) else 0


Label = tuple[Reason, str]
"""Names a watermark."""


def needs(holdings: Sequence[InstanceUsage], limits: Limits, active: Collection[Label] = ()) -> Iterator[ReclaimNeed]:
    """Yield what has to go, the narrowest level first. Lazily: after serving one, ask again with new holdings.

    Args:
        holdings: what every instance holds.
        limits: above the groups.
        active: watermarks that were crossed and whose low end was not reached yet.
    """
    return _NeedFinder(holdings, limits, active).needs()


class _NeedFinder:
    """Holdings against limits, once. Every sum is made once, however many storages and quotas ask for it."""

    def __init__(self, holdings: Sequence[InstanceUsage], limits: Limits, active: Collection[Label]) -> None:
        members: dict[str, list[InstanceUsage]] = {}
        for holding in holdings:
            members.setdefault(holding.group.name, []).append(holding)
        self._groups = [GroupUsage.of(each) for each in members.values()]
        self._limits = limits
        self._active = active
        self._on_storage: defaultdict[str, list[GroupUsage]] = defaultdict(list)
        self._allowed_on: defaultdict[str, int] = defaultdict(int)
        self._under_quota: defaultdict[str, list[GroupUsage]] = defaultdict(list)
        for group in self._groups:
            self._sort(group)
        self._guarantors: defaultdict[str, dict[str, InstanceGroup]] = defaultdict(dict)
        for configured in limits.groups:
            for guarantee in configured.storage_guarantees:
                self._guarantors[guarantee.storage_unique_name][configured.name] = configured

    def _sort(self, held: GroupUsage) -> None:
        """Register the group at the storages and quotas that it uses or may use."""
        for name in held.by_storage:
            self._on_storage[name].append(held)
        for name in held.group.storage_candidates:
            self._allowed_on[name] = max(self._allowed_on[name], held.largest_block)
        self._under_quota[held.group.global_quota_group_name].append(held)

    def needs(self) -> Iterator[ReclaimNeed]:
        for held in self._groups:
            yield from self._of_types(held)
        for storage in self._limits.storages:
            if storage.limit_bytes:
                yield from self._of_storage(storage)
            if storage.global_unique_name in self._limits.media:
                yield from self._of_medium(storage)
        for held in self._groups:
            yield from self._of_keys(held)
            yield from self._of_group(held)
        for quota in self._limits.quotas:
            yield from self._of_quota(quota)

    def _of_types(self, held: GroupUsage) -> Iterator[ReclaimNeed]:
        for quota in held.group.quota.quota_config:
            kind = quota.storage_type
            mark, used = type_watermark(held.group, kind, held.largest_block), held.by_type.get(kind, 0)
            name = f"{held.group.name}/{kind.kind}"
            yield from self._need(
                reason=Reason.TYPE, mark=mark, used=used, held=held, wanted=partial(_is_of_type, kind), name=name
            )

    def _of_group(self, held: GroupUsage) -> Iterator[ReclaimNeed]:
        group, used = held.group, held.total
        yield from self._need(
            reason=Reason.SIZE, mark=size_watermark(group), used=used, held=held, wanted=_anywhere, name=group.name
        )
        mark = group_watermark(group, held.largest_block)
        yield from self._need(reason=Reason.GROUP, mark=mark, used=used, held=held, wanted=_anywhere, name=group.name)

    def _of_keys(self, held: GroupUsage) -> Iterator[ReclaimNeed]:
        for holding in held.members:
            name = holding.instance.instance_id
            excess = self._excess((Reason.KEYS, name), key_watermark(held.group, holding.max_keys), holding.keys)
            if excess:
                yield ReclaimNeed(
                    Reason.KEYS, amount=excess, filter=_anywhere, usages=[holding], name=name, counts_blocks=True
                )

    def _of_storage(self, storage: StorageConfig) -> Iterator[ReclaimNeed]:
        mark = storage_watermark(storage, self._allowed_on.get(storage.global_unique_name, 0))
        yield from self._on(storage, Reason.STORAGE, mark)

    def _of_medium(self, storage: StorageConfig) -> Iterator[ReclaimNeed]:
        most = self._limits.media[storage.global_unique_name]
        yield from self._on(storage, Reason.MEDIUM, Watermark(most, most, most))

    def _on(self, storage: StorageConfig, reason: Reason, mark: Watermark | None) -> Iterator[ReclaimNeed]:
        name = storage.global_unique_name
        users = [(held, used) for held in self._on_storage.get(name, ()) if (used := held.by_storage[name])]
        guarantees = {each.name: each.guaranteed_on(storage) for each in self._guarantors.get(name, {}).values()}
        if reason is Reason.MEDIUM:  # space that is guaranteed and unused is not there
            by_group = {held.group.name: used for held, used in users}
            guarantees = {group: min(size, by_group.get(group, 0)) for group, size in guarantees.items()}
        wanted = partial(_is_on, name)
        yield from self._fair_needs(
            _SharedWatermark(reason=reason, name=name, mark=mark, users=users, wanted=wanted, guarantees=guarantees)
        )

    def _of_quota(self, quota: GlobalQuota) -> Iterator[ReclaimNeed]:
        drawing = self._under_quota.get(quota.name, ())
        mark = global_watermark(quota, max((held.largest_block for held in drawing), default=0))
        users = [(held, held.total) for held in drawing if held.total]
        yield from self._fair_needs(
            _SharedWatermark(
                reason=Reason.GLOBAL, name=quota.name, mark=mark, users=users, wanted=_anywhere, guarantees={}
            )
        )

    def _excess(self, label: Label, mark: Watermark | None, used: int) -> int:
        return mark.excess(used, is_active=label in self._active) if mark is not None else 0

    def _need(
        self, reason: Reason, mark: Watermark | None, used: int, held: GroupUsage, wanted: PlaceFilter, name: str
    ) -> Iterator[ReclaimNeed]:
        excess = self._excess((reason, name), mark, used)
        if excess:
            yield ReclaimNeed(reason, amount=excess, filter=wanted, usages=held.members, name=name)

    def _fair_needs(self, contest: _SharedWatermark) -> Iterator[ReclaimNeed]:
        """Take from the groups that exceed their entitlement the most: their guarantee, and an equal share of
        the capacity without guarantees. Each gives its excess above that; the group with the largest gives first, and
        the next one where that has nothing to give."""
        reason, name, mark, users, wanted, guarantees = contest
        total = sum(used for _, used in users)
        excess = self._excess((reason, name), mark, total + contest.reserved_bytes)
        if not excess or mark is None or not users:
            return
        share = max(0, mark.low - sum(guarantees.values())) // len(users)
        above = [(used - guarantees.get(held.group.name, 0) - share, held) for held, used in users]
        payers = sorted(
            ((most, held) for most, held in above if most > 0), key=lambda payer: (-payer[0], payer[1].group.name)
        )
        for most, held in payers:
            yield ReclaimNeed(
                reason, amount=min(excess, most), filter=wanted, usages=held.members, name=name, payer=held.group.name
            )
        # No group gives guaranteed bytes for an unused guarantee: only where usage itself is above the watermark.
        remainder = min(excess - sum(most for most, _ in payers), mark.excess(total))
        if remainder > 0:  # guarantees that together exceed the watermark, and are used
            yield ReclaimNeed(
                reason,
                amount=remainder,
                filter=wanted,
                usages=[each for held, _ in users for each in held.members],
                name=name,
            )


class _SharedWatermark(NamedTuple):
    """Groups that use one thing.

    Attributes:
        reason: its level.
        name: of the thing.
        mark: watermark of all groups together.
        users: those that use some of it, with how many bytes.
        wanted: places that belong to it.
        guarantees: bytes by group that it can always have, also of groups that use nothing.
    """

    reason: Reason
    name: str
    mark: Watermark | None
    users: Sequence[tuple[GroupUsage, int]]
    wanted: PlaceFilter
    guarantees: Mapping[str, int]

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are guaranteed and unused: no other group may use them."""
        used = {held.group.name: size for held, size in self.users}
        return sum(max(0, size - used.get(name, 0)) for name, size in self.guarantees.items())


def _anywhere(_place: StorageKey) -> bool:
    return True


def _is_of_type(kind: StorageType, place: StorageKey) -> bool:
    return place.storage_type is kind


def _is_on(name: str, place: StorageKey) -> bool:
    return place.storage == name


# Whether a write left its group above a watermark: then the reclaimer runs at once.
#
# The ledger also counts locations being deleted and, over a shared store, reserved bytes: the check may wake the
# reclaimer too often, never too seldom. Every write calls it, so the watermarks are computed when settings change.

_NO_MARK = 1 << 63  # more bytes than there are


class _GroupUsageSource(Protocol):
    """Usage of groups; at least the true usage."""

    def group_bytes(self, group_name: str) -> Mapping[StorageKey, int]:
        """Return the bytes that a group holds, by place."""

    def bytes_on_storage(self, storage: str) -> Mapping[str, int]:
        """Return the bytes on a storage, by group."""

    def bytes_by_group(self) -> Mapping[str, int]:
        """Return the bytes of every group that shares a global quota."""


class _OnStorage(NamedTuple):
    """The watermark of a storage with a capacity, and what groups are guaranteed on it."""

    mark: Watermark
    guaranteed: Mapping[str, int]


class _QuotaWatermark(NamedTuple):
    """The watermark of a global quota, and the groups that draw from it."""

    mark: Watermark
    group_names: Sequence[str]


class _GroupWatermarks(NamedTuple):
    """What the holdings of a group are compared with.

    Attributes:
        group: as configured when this was worked out.
        total: most bytes.
        by_type: most bytes on storage types that have a watermark.
        keys: most blocks of an instance, None without a watermark.
        storages: with a watermark; the most bytes on each, and what groups are guaranteed there.
        quota: the global quota, None without a watermark.
    """

    group: InstanceGroup
    total: int
    by_type: Sequence[tuple[StorageType, int]]
    keys: int | None
    storages: Sequence[tuple[str, int, Mapping[str, int]]]
    quota: _QuotaWatermark | None


class WatermarkCheck:
    """Compares what groups hold with the watermarks that concern them.

    Args:
        registry: groups, storages, global quotas, instances.
        held: bytes of groups and storages.
        key_counts: returns the blocks of each instance of a group.
    """

    def __init__(self, registry: Registry, held: _GroupUsageSource, key_counts: Callable[[str], Iterable[int]]) -> None:
        self._registry = registry
        self._held = held
        self._key_counts = key_counts
        self._generation = -1
        self._blocks: Mapping[str, int] = {}
        self._storages: Mapping[str, _OnStorage] = {}
        self._quotas: Mapping[str, _QuotaWatermark] = {}
        self._marks: dict[str, _GroupWatermarks] = {}

    def is_above_watermark(self, group: InstanceGroup) -> bool:
        """Return whether usage is above a watermark that concerns a group, which has just written."""
        generation = self._registry.generation
        if self._generation != generation:
            self._generation = generation
            self._read()
        marks = self._marks.get(group.name)
        if marks is None or marks.group is not group:
            marks = self._marks[group.name] = self._watermarks_of(group)
        held = self._held
        by_place = held.group_bytes(group.name)
        if sum(by_place.values()) > marks.total:
            return True
        for kind, most in marks.by_type:  # a loop, since every write passes here: a generator costs more
            if _on_type(by_place, kind) > most:
                return True
        for name, most, kept in marks.storages:
            if _claimed_bytes(group.name, held.bytes_on_storage(name), kept) > most:
                return True
        if marks.keys is not None and max(self._key_counts(group.name), default=0) > marks.keys:
            return True
        return marks.quota is not None and _quota_usage(marks.quota, held.bytes_by_group()) > marks.quota.mark.high

    def _watermarks_of(self, group: InstanceGroup) -> _GroupWatermarks:
        block, drawn = self._blocks.get(group.name, 0), self._quotas.get(group.global_quota_group_name)
        totals = [mark.high for mark in (group_watermark(group, block), size_watermark(group)) if mark is not None]
        kinds = [quota.storage_type for quota in group.quota.quota_config]
        marks = [(kind, mark.high) for kind in kinds if (mark := type_watermark(group, kind, block)) is not None]
        keys = key_watermark(group, group.cache_config.meta_indexer_config.max_key_count)
        shared = [(name, self._storages[name]) for name in group.storage_candidates if name in self._storages]
        return _GroupWatermarks(
            group,
            total=min(totals, default=_NO_MARK),
            by_type=marks,
            keys=keys.high if keys is not None else None,
            storages=[(name, mark.high, kept) for name, (mark, kept) in shared],
            quota=drawn,
        )

    def _read(self) -> None:
        groups = self._registry.groups.all()
        blocks: defaultdict[str, int] = defaultdict(int)
        for instance in self._registry.instances.all():
            name = instance.instance_group_name
            blocks[name] = max(blocks[name], instance.block_bytes)
        self._blocks = blocks
        on_storages = ((each, _on_storage(each, groups, blocks)) for each in self._registry.storages.all())
        self._storages = {each.global_unique_name: found for each, found in on_storages if found is not None}
        drawn = ((quota, _quota_watermark(quota, groups, blocks)) for quota in self._registry.quotas.all())
        self._quotas = {quota.name: found for quota, found in drawn if found is not None}
        self._marks = {}


def _on_type(by_place: Mapping[StorageKey, int], kind: StorageType) -> int:
    return sum([size for place, size in by_place.items() if place.storage_type is kind])


def _quota_usage(drawn: _QuotaWatermark, by_group: Mapping[str, int]) -> int:
    return sum([by_group.get(name, 0) for name in drawn.group_names])


def _claimed_bytes(writer: str, by_group: Mapping[str, int], guaranteed: Mapping[str, int]) -> int:
    """Return the bytes on a storage that count for a writer: the usage, and unused guarantees of others. Within its own
    guarantee a writer takes nothing that is guaranteed to others."""
    total = sum(by_group.values())
    if by_group.get(writer, 0) <= guaranteed.get(writer, 0):
        return total
    return total + sum(max(0, size - by_group.get(name, 0)) for name, size in guaranteed.items())


def _on_storage(
    storage: StorageConfig, groups: Sequence[InstanceGroup], blocks: Mapping[str, int]
) -> _OnStorage | None:
    users = [group.name for group in groups if storage.global_unique_name in group.storage_candidates]
    guarantors = (group for group in groups if group.storage_guarantees)  # few of many
    guaranteed = {group.name: size for group in guarantors if (size := group.guaranteed_on(storage))}
    mark = storage_watermark(storage, _largest(blocks, users))
    return _OnStorage(mark, guaranteed) if mark is not None else None


def _quota_watermark(
    quota: GlobalQuota, groups: Sequence[InstanceGroup], blocks: Mapping[str, int]
) -> _QuotaWatermark | None:
    names = [group.name for group in groups if group.global_quota_group_name == quota.name]
    mark = global_watermark(quota, _largest(blocks, names))
    return _QuotaWatermark(mark, names) if mark is not None else None


def _largest(blocks: Mapping[str, int], names: Iterable[str]) -> int:
    return max((blocks.get(name, 0) for name in names), default=0)
