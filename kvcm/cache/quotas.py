"""Quotas: the limits of a group, the bytes and blocks in use, and the space that a write may still take (wire.md 9.4).

A write reserves its plan before it allocates, so overlapping writes never exceed a limit together. Usage follows from
the changes of the indexes (invariant 4): the counters change in the same step as the records.

One manager alone counts exactly and never suspends (`UsageLedger`). Managers on one store share counters
(`SharedLedger`, protocol in `kvcm.store.redis.quota`): changes are reported in batches, many times a second, and a
reservation covers bytes that are not reported yet. The shared accounts:

* of a group: `b<storage type>/<storage>` bytes in a place, `k<uid>` blocks of an instance. Its quota, in total and by
  type, and the key limits of its instances are checked there.
* of a storage: `b<group>` bytes of a group. The storage's capacity and the guarantees of groups on it.
* of everything: `b<group>` bytes of a group, for global quotas. They have no account each, so that a group that changes
  its quota takes its usage along.

All accounts are always reported to, also without a limit, so that a new limit holds at once.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import structlog

from kvcm.index.meta_index import MetaIndex, UsageListener, UsageNote
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.locations import StorageKey
from kvcm.model.storages import StorageConfig, StorageType
from kvcm.model.units import format_size
from kvcm.model.uri import path_component
from kvcm.registry.registry import Registry
from kvcm.store.redis.client import ScriptCall
from kvcm.store.redis.quota import Counters, Demand, QuotaCounters, Report, TotalLimit
from kvcm.store.reserve import MetadataReserve

__all__ = [
    "MOST_KEYS",
    "OVERALL",
    "UNLIMITED_DISK",
    "AccountReservation",
    "DiskSpace",
    "FreeSpace",
    "InstanceIndexes",
    "Ledger",
    "LimitCache",
    "Limits",
    "MetadataDisk",
    "OnDevice",
    "PathStorages",
    "Reservation",
    "SharedLedger",
    "SharedQuota",
    "StorageLimit",
    "TakenBytes",
    "UsageLedger",
    "bytes_by_group",
    "count_usage",
    "field_title",
    "group_account",
    "storage_account",
]

MOST_KEYS = 1 << 62
"""Blocks of an instance without a limit."""


class StorageLimit(NamedTuple):
    """A storage with a capacity of its own.

    Attributes:
        capacity_bytes: what all groups may use together.
        guaranteed: by group, bytes that no other group may take.
    """

    capacity_bytes: int
    guaranteed: Mapping[str, int]

    def guaranteed_to_others(self, group_name: str) -> dict[str, int]:
        """Return by other group how many bytes count as taken at least."""
        return {name: size for name, size in self.guaranteed.items() if name != group_name}


class SharedQuota(NamedTuple):
    """A global quota and the groups that draw from it."""

    quota: GlobalQuota
    group_names: Sequence[str]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one group.

    Attributes:
        group: its quota.
        storages: by name, those that have a limit of their own.
        shared: the global quota that it draws from, None when there is none.
    """

    group: InstanceGroup
    storages: Mapping[str, StorageLimit] = field(default_factory=dict)
    shared: SharedQuota | None = None

    @property
    def max_key_count(self) -> int:
        """Most blocks of an instance."""
        return self.group.cache_config.meta_indexer_config.max_key_count or MOST_KEYS


class LimitCache:
    """Looks limits up; derived tables are rebuilt when the registry changed.

    Args:
        registry: groups, storages, global quotas.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._generation = -1
        self._storages: Mapping[str, StorageLimit] = {}
        self._group_names: Mapping[str, Sequence[str]] = {}

    def of(self, group: InstanceGroup) -> Limits:
        """Return the limits of a group."""
        generation = self._registry.generation
        if self._generation != generation:
            self._generation = generation
            self._reload()
        quota = self._registry.quotas.by_name.get(group.global_quota_group_name)
        names = self._group_names.get(group.global_quota_group_name, (group.name,))
        return Limits(group, self._storages, SharedQuota(quota, names) if quota is not None else None)

    def _reload(self) -> None:
        groups = self._registry.groups.all()
        guarantors = [group for group in groups if group.storage_guarantees]  # few of many
        self._storages = {
            config.global_unique_name: StorageLimit(config.limit_bytes, _guarantees_on(config, guarantors))
            for config in self._registry.storages.all()
            if config.limit_bytes
        }
        names: defaultdict[str, list[str]] = defaultdict(list)
        for group in groups:
            names[group.global_quota_group_name].append(group.name)
        self._group_names = names


def _guarantees_on(config: StorageConfig, groups: Sequence[InstanceGroup]) -> dict[str, int]:
    return {group.name: size for group in groups if (size := group.guaranteed_on(config))}


# Usage and reservations of one manager.


class Reservation(NamedTuple):
    """What one write session is about to take.

    Attributes:
        owner: id of the session.
        limits: those of the group that it counts against.
        uid: number of the instance, whose key limit it counts against.
        wanted_bytes: by place.
        new_keys: blocks that the index does not know yet.
        deadline: unix seconds; a reservation of a manager that died is void afterwards.
    """

    owner: str
    limits: Limits
    uid: int
    wanted_bytes: Mapping[StorageKey, int]
    new_keys: int
    deadline: float


class Ledger(Protocol):
    """Keeps count of groups and storages. Of a shared store, answers without waiting are as last read.

    Attributes:
        rejections: writes that this manager refused for lack of space, wholly or partly, by group.
    """

    rejections: Counter[str]

    def listener(self, group_name: str, uid: int) -> UsageListener:
        """Return the listener for the index of an instance of a group."""

    def used(self, group_name: str) -> Mapping[StorageKey, int]:
        """Return the bytes that a group uses, by place."""

    def group_bytes(self, group_name: str) -> Mapping[StorageKey, int]:
        """Return the bytes that a group uses, by place, at least: reservations of writes may be among them."""

    def bytes_on_storage(self, storage: str) -> Mapping[str, int]:
        """Return the same of a storage, by group."""

    def bytes_by_group(self) -> Mapping[str, int]:
        """Return the same in total, by group."""

    async def refresh_group(self, group_name: str, storages: Collection[str] = ()) -> None:
        """Ask the store what a group uses, and what all groups use on some storages."""

    async def refresh_groups(self, group_names: Collection[str]) -> None:
        """Ask the store what groups use, all at once."""

    async def free_space(self, limits: Limits, uid: int, index: MetaIndex, *, asks: bool = True) -> FreeSpace:
        """Return what an instance of a group may still take right now; without `asks` as last read, for a plan that is
        reserved before anything is stored, and made again where it does not fit."""

    async def reserve(self, reservation: Reservation, index: MetaIndex) -> bool:
        """Take the planned space. False: it does not fit any more; nothing is taken then."""

    async def release(self, reservation: Reservation, index: MetaIndex) -> None:
        """Give back a reservation under which nothing was stored, before more is reserved; `settle` follows."""

    def settle(self, reservation: Reservation, index: MetaIndex) -> None:
        """End a reservation: the index counts from now on."""


class TakenBytes(NamedTuple):
    """Bytes that are used or reserved.

    Attributes:
        by_place: of the group.
        by_storage: of every storage with a limit, by group.
        by_group: of the groups that share a global quota.
    """

    by_place: Mapping[StorageKey, int]
    by_storage: Mapping[str, Mapping[str, int]]
    by_group: Mapping[str, int]


class _ByteCounts:
    """Bytes by group and place, and the sums that limits are compared with."""

    def __init__(self) -> None:
        self.places: defaultdict[str, Counter[StorageKey]] = defaultdict(Counter)
        self.storages: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.groups: Counter[str] = Counter()

    def add(self, group_name: str, difference: Mapping[StorageKey, int], sign: int = 1) -> None:
        for place, size in difference.items():
            self.places[group_name][place] += sign * size
            self.storages[place.storage][group_name] += sign * size
            self.groups[group_name] += sign * size


_NO_BYTES: Final[Mapping[StorageKey, int]] = MappingProxyType({})


class UsageLedger:
    """Usage of all groups while no other manager works on the store: exact, and nothing ever suspends."""

    def __init__(self) -> None:
        self._used = _ByteCounts()
        self._taken = _ByteCounts()
        self.rejections: Counter[str] = Counter()

    def listener(self, group_name: str, uid: int) -> UsageListener:
        def note(difference: Mapping[StorageKey, int], _keys: int) -> None:
            self._used.add(group_name, difference)
            self._taken.add(group_name, difference)

        return lambda: note

    def used(self, group_name: str) -> Mapping[StorageKey, int]:
        return self._used.places.get(group_name, _NO_BYTES)

    def group_bytes(self, group_name: str) -> Mapping[StorageKey, int]:
        return self.used(group_name)

    def bytes_on_storage(self, storage: str) -> Mapping[str, int]:
        return self._used.storages.get(storage, Counter())

    def bytes_by_group(self) -> Mapping[str, int]:
        return self._used.groups

    async def refresh_group(self, group_name: str, storages: Collection[str] = ()) -> None:
        """Everything is known here already."""

    async def refresh_groups(self, group_names: Collection[str]) -> None:
        """Everything is known here already."""

    async def free_space(self, limits: Limits, uid: int, index: MetaIndex, *, asks: bool = True) -> FreeSpace:
        taken = TakenBytes(self._taken.places[limits.group.name], self._taken.storages, self._taken.groups)
        return FreeSpace(limits, taken, index.free_key_count)

    async def reserve(self, reservation: Reservation, index: MetaIndex) -> bool:
        self._taken.add(reservation.limits.group.name, reservation.wanted_bytes)
        index.reserve_keys(reservation.new_keys)
        return True

    async def release(self, reservation: Reservation, index: MetaIndex) -> None:
        """Settling does that at once."""

    def settle(self, reservation: Reservation, index: MetaIndex) -> None:
        self._taken.add(reservation.limits.group.name, reservation.wanted_bytes, -1)
        index.reserve_keys(-reservation.new_keys)


# The file system that the metadata is on, and what KV may still take of it (`kvcm.store.reserve`).
#
# Free bytes are asked for at every write that may go there; from them comes off what open write sessions were given and
# may not have written yet. So no number of writers touches the reserve together.


@dataclass(slots=True)
class DiskSpace:
    """What one write may put on storages that share the file system of the metadata.

    Attributes:
        storages: names of those.
        free_bytes: what KV may still take there.
        describe: returns a text about that file system, for messages.
        planned: bytes that the write has been given so far.
        has_refused: whether something did not fit.
    """

    storages: frozenset[str] = frozenset()
    free_bytes: int = 0
    describe: Callable[[], str] = str
    planned: int = 0
    has_refused: bool = False

    def limit(self, storage: str, size_bytes: int) -> str | None:
        """Return None where so many bytes may go to a storage, else why not."""
        if storage not in self.storages or self.planned + size_bytes <= self.free_bytes:
            return None
        self.has_refused = True
        return f"storage {storage!r} has no space for {format_size(size_bytes)}: {self.describe()}: retry shortly"

    def fitting(self, storage: str, size_bytes: int, most: int) -> int:
        """Return how many times so many bytes fit, at most so many times."""
        if storage not in self.storages or not size_bytes:
            return most
        return max(0, min(most, (self.free_bytes - self.planned) // size_bytes))

    def add_planned(self, storage: str, size_bytes: int) -> None:
        """Take bytes of a storage."""
        if storage in self.storages:
            self.planned += size_bytes


UNLIMITED_DISK: Final = DiskSpace()


class OnDevice(Protocol):
    """An open path storage."""

    @property
    def device(self) -> int | None:
        """Number of the file system that it is on, None while that is not known."""


class PathStorages(Protocol):
    """The open storages."""

    def path_storages(self) -> Mapping[str, OnDevice]:
        """Return the open path storages by name."""


_LEAST_FILES: Final = 128  # that can still be made; KV gets none of the last. Blocks leave before (`storage/file.py`)


class MetadataDisk:
    """The file system of the metadata.

    Args:
        reserve: of the metadata; None where they are on no disk of this manager.
        storages: the open storages.
        clock: time source.
    """

    def __init__(self, reserve: MetadataReserve | None, storages: PathStorages, clock: Clock) -> None:
        self._reserve = reserve if reserve is not None and reserve.setting_bytes else None
        self._storages = storages
        self._clock = clock
        self._device = self._reserve.device if self._reserve is not None else None
        self._reserved_bytes = self._reserve.size_bytes() if self._reserve is not None else 0
        self._writing: dict[str, tuple[float, int]] = {}  # by session: its deadline, and bytes

    def space(self, names: Collection[str]) -> DiskSpace:
        """Return what a write may put on those of some storages that are on this file system. Blocks as a local file
        system does, for a few microseconds."""
        here = self._here()
        if self._reserve is None or here.isdisjoint(names):
            return UNLIMITED_DISK
        directory = self._reserve.directory
        try:
            status = os.statvfs(directory)
        except OSError as error:
            reason = f"the disk of the metadata ({directory}) cannot be asked: {error.strerror}"
            return DiskSpace(here, 0, lambda: reason)
        free_bytes = status.f_bavail * status.f_frsize
        if 0 < status.f_favail < _LEAST_FILES:
            kv_bytes = 0
        else:
            kv_bytes = max(0, free_bytes - self._reserved_bytes - self._writing_bytes())
        return DiskSpace(here, kv_bytes, lambda: self._description(directory, status.f_favail, free_bytes))

    def _description(self, directory: Path, free_files: int, free_bytes: int) -> str:
        where = f"the disk of the metadata ({directory})"
        if 0 < free_files < _LEAST_FILES:
            return f"only {free_files} more files can be made on {where}"
        reserved = f"{format_size(self._reserved_bytes)} are reserved for metadata (kvcm.store.reserve_bytes)"
        return f"{format_size(free_bytes)} are free on {where}, of which {reserved}"

    def _here(self) -> frozenset[str]:
        if self._device is None:
            return frozenset()
        storages = self._storages.path_storages().items()
        return frozenset(name for name, storage in storages if storage.device == self._device)

    def _writing_bytes(self) -> int:
        now = self._clock.now()
        self._writing = {name: each for name, each in self._writing.items() if each[0] > now}
        return sum(size for _, size in self._writing.values())

    def begin(self, session_id: str, deadline: float, wanted_bytes: Mapping[StorageKey, int]) -> None:
        """Count what a write session was given, until it ends or its deadline has passed."""
        here = self._here()
        size = sum(size for place, size in wanted_bytes.items() if place.storage in here)
        if size:
            self._writing[session_id] = (deadline, size)

    def end(self, session_id: str) -> None:
        """Count a session no more."""
        self._writing.pop(session_id, None)

    def reserved_bytes(self, storage: str) -> int:
        """Return what of a storage's medium is kept for metadata. Blocks as a local file system does."""
        if self._reserve is None or storage not in self._here():
            return 0
        return self._reserve.size_bytes()


class FreeSpace:
    """What a group may still take; the planning of one write takes from it block by block.

    Args:
        limits: of the group.
        taken: bytes already used or reserved.
        free_keys: blocks that the index still accepts.
    """

    def __init__(self, limits: Limits, taken: TakenBytes, free_keys: int) -> None:
        self._limits = limits
        self._by_type: defaultdict[StorageType, int] = defaultdict(int)  # a `Counter` takes five times as long to make
        for place, size in taken.by_place.items():
            self._by_type[place.storage_type] += size
        self._total = sum(taken.by_place.values())
        self._by_storage = taken.by_storage
        self._on_storage: dict[str, tuple[int, int]] = {}
        self._shared = sum(taken.by_group.get(name, 0) for name in limits.shared.group_names) if limits.shared else 0
        self._planned: defaultdict[str, int] = defaultdict(int)
        self.free_keys = free_keys
        self.disk = UNLIMITED_DISK
        """Of storages that share a file system with the metadata."""

    def limit(self, place: StorageKey, size_bytes: int) -> str | None:
        """Return None when `size_bytes` fit in a place, else the limit that they would exceed."""
        return (
            self._group_limit(size_bytes)
            or self._shared_limit(size_bytes)
            or self._type_limit(place.storage_type, size_bytes)
            or self._storage_limit(place.storage, size_bytes)
            or self.disk.limit(place.storage, size_bytes)
        )

    def _group_limit(self, size_bytes: int) -> str | None:
        group = self._limits.group
        if self._total + size_bytes <= group.quota.capacity:
            return None
        return (
            f"group {group.name!r} is full: it uses {self._total} of its quota.capacity of {group.quota.capacity} bytes"
        )

    def _shared_limit(self, size_bytes: int) -> str | None:
        if self._limits.shared is None:
            return None
        quota = self._limits.shared.quota
        if self._shared + size_bytes <= quota.capacity_bytes:
            return None
        return (
            f"global quota {quota.name!r} is full: its groups use {self._shared} of its capacity_bytes of "
            f"{quota.capacity_bytes}"
        )

    def _type_limit(self, storage_type: StorageType, size_bytes: int) -> str | None:
        group = self._limits.group
        capacity = group.quota.capacity_of(storage_type)
        used = self._by_type[storage_type]
        if capacity is None or used + size_bytes <= capacity:
            return None
        kind = storage_type.kind
        return f"group {group.name!r} is full on {kind}: it uses {used} of its quota of {capacity} bytes on {kind}"

    def _storage_limit(self, storage: str, size_bytes: int) -> str | None:
        limit = self._limits.storages.get(storage)
        if limit is None:
            return None
        used, kept = self._on_storage.get(storage) or self._load_storage(storage, limit)
        used += self._planned[storage]
        if used + kept + size_bytes <= limit.capacity_bytes:
            return None
        others = f" and {kept} more are guaranteed to other groups" if kept else ""
        return f"storage {storage!r} is full: {used} of its capacity_bytes of {limit.capacity_bytes} are used{others}"

    def _load_storage(self, storage: str, limit: StorageLimit) -> tuple[int, int]:
        """Return the bytes taken on a storage, and those reserved for other groups beside."""
        taken = self._by_storage.get(storage, {})
        kept_from = limit.guaranteed_to_others(self._limits.group.name).items()
        kept = sum(max(0, size - taken.get(name, 0)) for name, size in kept_from)
        self._on_storage[storage] = sum(taken.values()), kept
        return self._on_storage[storage]

    def fitting(self, place: StorageKey, size_bytes: int, most: int) -> int:
        """Return how many times `size_bytes` fit in a place one after the other, at most so many times."""
        group, shared, limit = self._limits.group, self._limits.shared, self._limits.storages.get(place.storage)
        free = group.quota.capacity - self._total
        if shared is not None:
            free = min(free, shared.quota.capacity_bytes - self._shared)
        capacity = group.quota.capacity_of(place.storage_type)
        if capacity is not None:
            free = min(free, capacity - self._by_type[place.storage_type])
        if limit is not None:
            used, kept = self._on_storage.get(place.storage) or self._load_storage(place.storage, limit)
            free = min(free, limit.capacity_bytes - used - self._planned[place.storage] - kept)
        if free < size_bytes:
            return 0
        most = self.disk.fitting(place.storage, size_bytes, most)
        return min(most, free // size_bytes) if size_bytes else most

    def add_planned(self, place: StorageKey, size_bytes: int) -> None:
        """Count bytes as taken."""
        self._by_type[place.storage_type] += size_bytes
        self._planned[place.storage] += size_bytes
        self._total += size_bytes
        self._shared += size_bytes
        self.disk.add_planned(place.storage, size_bytes)


# Accounts and fields of the shared counters.

OVERALL = "a.all"
InstanceIndexes = Mapping[str, Mapping[int, MetaIndex]]
"""Every index by group and uid, also those of instances that are being removed."""
AccountReservation = tuple[str, list[Demand], list[TotalLimit]]
"""Account, reserved bytes there, and the limits that have to hold."""


def group_account(group_name: str) -> str:
    """Return the account of a group."""
    return f"g.{path_component(group_name)}"


def storage_account(storage: str) -> str:
    """Return the account of a storage."""
    return f"s.{path_component(storage)}"


def _keys_field(uid: int) -> str:
    """Return the field that counts the blocks of an instance."""
    return f"k{uid}"


def _group_field(group_name: str) -> str:
    return f"b{group_name}"


def _type_prefix(storage_type: StorageType) -> str:
    return f"b{int(storage_type)}/"


def _parse_place(place: StorageKey) -> str:
    return f"{_type_prefix(place.storage_type)}{place.storage}"


def _bytes_by_place(fields: Mapping[str, int]) -> dict[StorageKey, int]:
    """Read the bytes in a group's account."""
    found: dict[StorageKey, int] = {}
    for name, value in fields.items():
        if name[0] == "b" and value:
            number, _, storage = name[1:].partition("/")
            found[StorageKey(storage, StorageType(int(number)))] = value
    return found


def bytes_by_group(fields: Mapping[str, int]) -> dict[str, int]:
    """Read the bytes in a storage's account, or in that over all."""
    return {name[1:]: value for name, value in fields.items()}


def field_title(account: str, field: str) -> str:
    """Return what a field counts, for people."""
    if not account.startswith("g."):
        return f"bytes of group {field[1:]!r}"
    if field[0] == "k":
        return f"blocks of registration {field[1:]}"
    ((place, _),) = _bytes_by_place({field: 1}).items()
    return f"bytes on {place.storage} ({place.storage_type.kind})"


def _fields_by_account(
    group_name: str, uid: int, difference: Mapping[StorageKey, int], keys: int
) -> dict[str, dict[str, int]]:
    """Return what a change of an instance's usage changes, by account and field."""
    by_storage: Counter[str] = Counter()
    for place, size in difference.items():
        by_storage[place.storage] += size
    own = {_parse_place(place): size for place, size in difference.items()}
    field = _group_field(group_name)
    return {
        group_account(group_name): {**own, _keys_field(uid): keys},
        **{storage_account(storage): {field: size} for storage, size in by_storage.items()},
        OVERALL: {field: sum(by_storage.values())},
    }


def _account_reservations(reservation: Reservation, max_key_count: int) -> list[AccountReservation]:
    """Return what a reservation reserves, in the order in which every manager does."""
    limits, wanted = reservation.limits, reservation.wanted_bytes
    field = _group_field(limits.group.name)
    made = [_group_reservation(reservation, max_key_count)]
    by_storage: Counter[str] = Counter()
    for place, size in wanted.items():
        by_storage[place.storage] += size
    for storage in sorted(by_storage.keys() & limits.storages.keys()):
        size, limit = by_storage[storage], limits.storages[storage]
        floors = {_group_field(name): kept for name, kept in limit.guaranteed_to_others(limits.group.name).items()}
        total = TotalLimit("b", floors, size, limit.capacity_bytes)
        made.append((storage_account(storage), [Demand(field, size)], [total]))
    if limits.shared is not None:
        size, quota = sum(wanted.values()), limits.shared.quota
        groups = {_group_field(name): 0 for name in limits.shared.group_names}
        made.append((OVERALL, [Demand(field, size)], [TotalLimit("", groups, size, quota.capacity_bytes)]))
    return made


def _group_reservation(reservation: Reservation, max_key_count: int) -> AccountReservation:
    quota, wanted = reservation.limits.group.quota, reservation.wanted_bytes
    by_type: Counter[StorageType] = Counter()
    for place, size in wanted.items():
        by_type[place.storage_type] += size
    totals = [TotalLimit(prefix="b", floors={}, amount=sum(wanted.values()), limit=quota.capacity)]
    totals += [
        TotalLimit(prefix=_type_prefix(storage_type), floors={}, amount=size, limit=max(0, limit))
        for storage_type, size in by_type.items()
        if (limit := quota.capacity_of(storage_type)) is not None
    ]
    demands = [Demand(_parse_place(place), size) for place, size in wanted.items()]
    if max_key_count < MOST_KEYS:
        field = _keys_field(reservation.uid)
        demands.append(Demand(field, reservation.new_keys))
        totals.append(TotalLimit("", {field: 0}, reservation.new_keys, max_key_count))
    return group_account(reservation.limits.group.name), demands, totals


async def count_usage(census: InstanceIndexes, *, is_exact: bool = True) -> dict[str, dict[str, int]]:
    """Return what indexes use, as their stores count it, by account and field; `is_exact` as of `MetaIndex.refresh`."""
    accounts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for group_name, indexes in census.items():
        for uid, index in indexes.items():
            await index.refresh(is_exact=is_exact)
            changes = _fields_by_account(group_name, uid, index.usage_bytes, index.key_count)
            for account, fields in changes.items():
                accounts[account].update(fields)
    return {account: dict(fields) for account, fields in accounts.items()}


# Usage and reservations of several managers on one store.

_log = structlog.get_logger("kvcm.cache")


@dataclass(slots=True)
class _Outbox:
    """What this manager has to report to one account. What shrank did so in `epoch` or later."""

    epoch: int = 0
    grown: Counter[str] = field(default_factory=Counter)
    shrunk: Counter[str] = field(default_factory=Counter)
    done: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.grown or self.shrunk or self.done)


class SharedLedger:
    """Counts in a store that all managers share.

    Args:
        counters: the shared counters.
        node_id: id of this manager, new with every start.
    """

    def __init__(self, counters: QuotaCounters, node_id: str) -> None:
        self._counters = counters
        self._node_id = node_id
        self._latest: dict[str, Counters] = {}
        self._epochs: Mapping[
            str, int
        ] = {}  # replaced, never changed: a change of usage keeps the one of its beginning
        self._outboxes: defaultdict[str, _Outbox] = defaultdict(_Outbox)
        self._sending: dict[str, Report] = {}
        self._numbers: Counter[str] = Counter()
        self._wake = asyncio.Event()
        self.rejections: Counter[str] = Counter()

    def listener(self, group_name: str, uid: int) -> UsageListener:
        """Return the listener for the index of an instance of a group."""

        def begin() -> UsageNote:
            # Before the store is asked: what shrinks from now on happens in these epochs or later ones.
            epochs = self._epochs

            def note(difference: Mapping[StorageKey, int], keys: int) -> None:
                for account, changes in _fields_by_account(group_name, uid, difference, keys).items():
                    self._record_change(account, epochs.get(account, 0), changes)

            return note

        return begin

    def _record_change(self, account: str, epoch: int, changes: Mapping[str, int]) -> None:
        outbox = self._outboxes[account]
        if any(change < 0 for change in changes.values()):
            outbox.epoch = min(outbox.epoch, epoch) if outbox.shrunk else epoch
        for name, change in changes.items():
            if change:
                (outbox.grown if change > 0 else outbox.shrunk)[name] += change
        self._wake.set()

    def used(self, group_name: str) -> Mapping[StorageKey, int]:
        """Return the bytes that a group uses, by place, as last read."""
        latest = self._latest.get(group_account(group_name))
        return _bytes_by_place(latest.used) if latest is not None else {}

    def group_bytes(self, group_name: str) -> Mapping[StorageKey, int]:
        """Return the bytes that a group uses or has reserved, by place, as last read. What was stored a moment ago and
        is not reported yet is still reserved."""
        return _bytes_by_place(self._reserved_or_used_in(group_account(group_name)))

    def bytes_on_storage(self, storage: str) -> Mapping[str, int]:
        """Return the same of a storage, by group. Writes read those that have a capacity."""
        return bytes_by_group(self._reserved_or_used_in(storage_account(storage)))

    def bytes_by_group(self) -> Mapping[str, int]:
        """Return the same in total, by group. Writes that draw from a global quota read it."""
        return bytes_by_group(self._reserved_or_used_in(OVERALL))

    def _reserved_or_used_in(self, account: str) -> Mapping[str, int]:
        latest = self._latest.get(account)
        return _used_and_reserved(latest) if latest is not None else {}

    async def refresh_group(self, group_name: str, storages: Collection[str] = ()) -> None:
        """Ask the store what a group uses, and what all groups use on some storages."""
        await self.refresh([group_account(group_name), *map(storage_account, storages)])

    async def refresh_groups(self, group_names: Collection[str]) -> None:
        """Ask the store what groups use, all at once."""
        await self.refresh([group_account(name) for name in group_names])

    async def refresh(self, accounts: Collection[str]) -> dict[str, Counters]:
        """Read the counters of accounts."""
        answers = await self._counters.read_many(list(accounts))
        return {account: self._update(account, counters) for account, counters in zip(accounts, answers, strict=True)}

    async def free_space(self, limits: Limits, uid: int, index: MetaIndex, *, asks: bool = True) -> FreeSpace:
        """Return what an instance of a group may still take right now, or could when that was last read."""
        own = group_account(limits.group.name)
        limited = {name: storage_account(name) for name in limits.group.storage_candidates if name in limits.storages}
        overall = () if limits.shared is None else (OVERALL,)
        accounts = [own, *limited.values(), *overall]
        if asks or not self._latest.keys() >= set(accounts):
            counters_of: Mapping[str, Counters] = await self.refresh(accounts)
        else:
            counters_of = {account: self._latest[account] for account in accounts}
        fields = {account: _used_and_reserved(counters) for account, counters in counters_of.items()}
        taken = TakenBytes(
            _bytes_by_place(fields[own]),
            {name: bytes_by_group(fields[account]) for name, account in limited.items()},
            bytes_by_group(fields.get(OVERALL, {})),
        )
        return FreeSpace(limits, taken, max(0, index.max_key_count - fields[own][_keys_field(uid)]))

    async def reserve(self, reservation: Reservation, index: MetaIndex) -> bool:
        """Take the planned space. False: it does not fit any more; nothing is taken then."""
        asked: list[str] = []
        try:
            for account, demands, limits in _account_reservations(reservation, index.max_key_count):
                asked.append(account)
                fits, counters = await self._counters.reserve(
                    account, reservation.owner, reservation.deadline, demands, limits
                )
                self._update(account, counters)
                if not fits:
                    await asyncio.gather(*(self._counters.release(each, reservation.owner) for each in asked[:-1]))
                    return False
        except BaseException:
            self._end(reservation.owner, asked)  # nothing will be stored under it
            raise
        return True

    def reserving(self, reservation: Reservation, index: MetaIndex) -> list[ScriptCall]:
        """Return the calls that do `reserve`, for a write that does more with them; `reserved` reads their answers."""
        return [
            self._counters.reserving(account, reservation.owner, reservation.deadline, demands, limits)
            for account, demands, limits in _account_reservations(reservation, index.max_key_count)
        ]

    async def reserved(self, reservation: Reservation, index: MetaIndex, answers: Sequence[Any]) -> bool:
        """Return whether a reservation fits; if not, nothing is taken."""
        accounts = [account for account, _, _ in _account_reservations(reservation, index.max_key_count)]
        fits: dict[str, bool] = {}
        for account, answer in zip(accounts, answers, strict=True):
            fits[account], counters = self._counters.reserved(answer)
            self._update(account, counters)
        if not all(fits.values()):
            held = [account for account, each in fits.items() if each]
            await asyncio.gather(*(self._counters.release(account, reservation.owner) for account in held))
        return all(fits.values())

    async def release(self, reservation: Reservation, index: MetaIndex) -> None:
        """Give back a reservation under which nothing was stored, before more is reserved; `settle` follows."""
        made = _account_reservations(reservation, index.max_key_count)
        await asyncio.gather(*(self._counters.release(account, reservation.owner) for account, _, _ in made))

    def settle(self, reservation: Reservation, index: MetaIndex) -> None:
        """End a reservation, together with the report of the blocks that were stored under it."""
        self._end(
            reservation.owner, (account for account, _, _ in _account_reservations(reservation, index.max_key_count))
        )

    def _end(self, owner: str, accounts: Iterable[str]) -> None:
        for account in accounts:
            self._outboxes[account].done.append(owner)
        self._wake.set()

    async def run(self, interval_seconds: float = 0.02) -> None:
        """Send reports as they come, until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(interval_seconds)
            self._wake.clear()
            try:
                await self.flush()
            except KvcmError as error:  # nothing is lost: the same report is sent again
                _log.warning("usage_not_reported", reason=str(error))
                self._wake.set()
                await asyncio.sleep(1)

    async def flush(self) -> None:
        """Send everything that is to be reported.

        Raises:
            StorageIOError: the store cannot be asked; unconfirmed reports are sent again next time.
        """
        while reports := self._next_reports():
            # Where one node of a cluster is away, the others have their reports.
            parts = [reports] if self._counters.are_together else [{each: reports[each]} for each in reports]
            outcomes = await asyncio.gather(*map(self._send, parts), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome

    async def _send(self, reports: Mapping[str, Report]) -> None:
        for account, counters in (await self._counters.report(reports)).items():
            if self._sending.get(account) is reports[account]:
                del self._sending[account]
            self._update(account, counters)

    def _next_reports(self) -> dict[str, Report]:
        """Return the reports to send now. One that was sent and not confirmed perhaps arrived: it keeps its number."""
        for account in sorted(self._outboxes.keys() - self._sending.keys()):
            outbox = self._outboxes.pop(account)
            if outbox.is_empty:
                continue
            self._numbers[account] += 1
            self._sending[account] = Report(
                node=self._node_id,
                number=self._numbers[account],
                epoch=outbox.epoch,
                grown=dict(outbox.grown),
                shrunk=dict(outbox.shrunk),
                done=tuple(outbox.done),
            )
        return dict(self._sending)

    def _update(self, account: str, counters: Counters) -> Counters:
        self._latest[account] = counters
        if self._epochs.get(account, 0) != counters.epoch:
            self._epochs = {**self._epochs, account: counters.epoch}
        return counters

    async def overdue(self, accounts: Collection[str], now: float) -> frozenset[str]:
        """Return the accounts with a reservation whose deadline has passed."""
        return await self._counters.overdue(list(accounts), now)

    async def recount(
        self, accounts: Collection[str], census: Callable[[], Awaitable[InstanceIndexes]], now: float
    ) -> dict[str, bool]:
        """Put the sum of the counters that change with the records in the place of what was reported.

        Args:
            accounts: which.
            census: returns the indexes of all instances that count in them. Asked when the recount has begun: what it
                does not name counts as nothing but what grew since then.
            now: unix seconds.

        Returns:
            By account whether it was carried through: not where another manager does just now.
        """
        begun = {account: await self._counters.begin_recount(account, now) for account in accounts}
        truth = await count_usage(await census())
        return {
            account: await self._counters.end_recount(account, recount, truth.get(account, {}))
            for account, recount in begun.items()
        }


def _used_and_reserved(counters: Counters) -> Counter[str]:
    taken = Counter(counters.used)
    taken.update(counters.reserved)
    return taken
