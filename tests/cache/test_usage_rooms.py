"""What groups and storages use, and what a write may still take."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from at_once import now
from cache_rig import TableView, group, location
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.limits import LimitBook, Limits, SharedQuota, StorageLimit
from kvcm.cache.usage import Reservation, Room, UsageLedger
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.groups import GlobalQuota, InstanceGroup, InstanceGroupQuota, QuotaConfig, StorageGuarantee
from kvcm.model.locations import BlockRecord, Place
from kvcm.model.storages import DummyStorageSpec, NfsStorageSpec, StorageConfig, StorageType
from kvcm.registry.closed import ClosedStorages
from kvcm.registry.registry import Registry

NFS = Place("nfs", StorageType.ST_NFS)
NFS2 = Place("nfs2", StorageType.ST_NFS)
FS = Place("fs", StorageType.ST_3FS)
POOL = Place("pool", StorageType.ST_TAIRMEMPOOL)
UID = 1


def new_index(max_key_count: int = 1 << 62) -> MetaIndex:
    return MetaIndex(MemoryBackend(), TableView(), max_key_count=max_key_count)


INDEX = new_index()


def room(ledger: UsageLedger, configured: InstanceGroup | Limits, index: MetaIndex = INDEX) -> Room:
    limits = Limits(configured) if isinstance(configured, InstanceGroup) else configured
    return now(ledger.room(limits, UID, index))


def reserve(
    ledger: UsageLedger,
    configured: InstanceGroup | Limits,
    wanted: Mapping[Place, int],
    new_keys: int = 0,
    index: MetaIndex = INDEX,
) -> Reservation:
    limits = Limits(configured) if isinstance(configured, InstanceGroup) else configured
    reservation = Reservation("owner", limits, UID, wanted, new_keys, 0.0)
    assert now(ledger.reserve(reservation, index))
    return reservation


def test_usage_is_counted_by_group_and_place() -> None:
    ledger = UsageLedger()
    here, again, there = ledger.listener("group", 1)(), ledger.listener("group", 2)(), ledger.listener("other", 3)()
    here({NFS: 10}, 1)
    again({NFS: 5, FS: 3}, 1)
    there({NFS: 100}, 1)
    here({NFS: -2}, 0)
    assert dict(ledger.used("group")) == {NFS: 13, FS: 3}
    assert dict(ledger.used("other")) == {NFS: 100}
    assert dict(ledger.used("unknown")) == {}
    assert [sum(ledger.held_on(name).values()) for name in ("nfs", "fs", "pool")] == [113, 3, 0]
    assert [ledger.held_on("nfs").get(name, 0) for name in ("group", "other", "unknown")] == [13, 100, 0]


@pytest.mark.parametrize(
    ("size", "refused_by"),
    [(0, None), (7, None), (8, "30 bytes on file"), (18, "30 bytes on file"), (19, "capacity of 50")],
)
def test_the_room_is_exact_to_the_byte(size: int, refused_by: str | None) -> None:
    """Group: 32 of 50 used. Files: 23 of 30 used."""
    ledger = UsageLedger()
    ledger.listener("group", UID)()({NFS: 23, FS: 9}, 2)
    limit = room(ledger, group(capacity=50, quotas={NFS.storage_type: 30})).limit(NFS, size)
    assert (limit is None) == (refused_by is None)
    if refused_by is not None:
        assert refused_by in str(limit)
        assert "'group' is full" in str(limit)


def test_a_type_that_is_not_listed_has_the_groups_limit_only() -> None:
    offered = room(UsageLedger(), group(capacity=50, quotas={NFS.storage_type: 0}))
    assert offered.limit(POOL, 50) is None
    assert offered.limit(POOL, 51) is not None
    assert offered.limit(NFS, 1) is not None
    assert offered.limit(NFS, 0) is None


def test_what_a_plan_takes_is_gone_for_the_rest_of_it() -> None:
    ledger = UsageLedger()
    offered = room(ledger, group(capacity=50, quotas={NFS.storage_type: 30}))
    offered.take(NFS, 25)
    assert offered.limit(NFS, 5) is None
    assert offered.limit(NFS, 6) is not None
    offered.take(FS, 20)
    assert offered.limit(FS, 5) is None
    assert offered.limit(FS, 6) is not None
    assert room(ledger, group(capacity=50)).limit(NFS, 50) is None, "planning takes nothing from the ledger"


def test_reservations_count_until_they_end() -> None:
    ledger, configured = UsageLedger(), group(capacity=50)
    reservations = [reserve(ledger, configured, wanted) for wanted in ({NFS: 20}, {NFS: 10, FS: 15})]
    assert room(ledger, configured).limit(NFS, 5) is None
    assert room(ledger, configured).limit(NFS, 6) is not None
    assert dict(ledger.used("group")) == {}
    ledger.settle(reservations[0], INDEX)
    assert room(ledger, configured).limit(NFS, 25) is None
    assert room(ledger, configured).limit(NFS, 26) is not None
    ledger.settle(reservations[1], INDEX)
    assert room(ledger, configured).limit(NFS, 50) is None


async def test_reserved_keys_count_until_they_end() -> None:
    """A reservation of three of five keys leaves two; one that was stored under it counts by itself afterwards."""
    ledger, configured, index = UsageLedger(), group(), new_index(max_key_count=5)
    reservation = reserve(ledger, configured, {}, 3, index)
    assert room(ledger, configured, index).free_keys == 2
    await index.read_modify_write([1], lambda _key, _old: BlockRecord(None, 0, (location("a"),)), reserved=True)
    ledger.settle(reservation, index)
    assert room(ledger, configured, index).free_keys == 4


def test_two_storages_of_one_type_share_the_quota_of_the_type() -> None:
    ledger = UsageLedger()
    ledger.listener("group", UID)()({NFS: 20, NFS2: 5}, 2)
    offered = room(ledger, group(quotas={NFS.storage_type: 30}))
    assert offered.limit(NFS2, 5) is None
    assert "uses 25 of its quota of 30 bytes on file" in str(offered.limit(NFS2, 6))


# Storages, guarantees and global quotas.


def test_the_capacity_of_a_storage_counts_over_all_groups() -> None:
    ledger = UsageLedger()
    ledger.listener("other", 2)()({NFS: 70}, 1)
    limits = Limits(group(), {"nfs": StorageLimit(100, {})})
    offered = room(ledger, limits)
    assert offered.limit(NFS, 30) is None
    assert str(offered.limit(NFS, 31)) == "storage 'nfs' is full: 70 of its capacity_bytes of 100 are used"
    assert offered.limit(NFS2, 1000) is None, "another storage of that type"
    offered.take(NFS, 20)
    assert offered.limit(NFS, 10) is None
    assert offered.limit(NFS, 11) is not None


@pytest.mark.parametrize(("used_by_other", "free"), [(0, 60), (10, 60), (40, 60), (70, 30)])
def test_what_another_group_is_guaranteed_is_kept_for_it(used_by_other: int, free: int) -> None:
    ledger = UsageLedger()
    ledger.listener("other", 2)()({NFS: used_by_other}, 1)
    limits = Limits(group(), {"nfs": StorageLimit(100, {"other": 40, "group": 90})})
    offered = room(ledger, limits)
    assert offered.limit(NFS, free) is None
    refusal = str(offered.limit(NFS, free + 1))
    assert ("guaranteed to other groups" in refusal) == (used_by_other < 40)
    assert "capacity_bytes of 100" in refusal


def test_reservations_of_other_groups_count_towards_storages_and_global_quotas() -> None:
    ledger, other = UsageLedger(), replace(group(), name="other")
    reservation = reserve(ledger, other, {NFS: 60})
    shared = SharedQuota(GlobalQuota("all", 80), ("group", "other"))
    limits = Limits(group(), {"nfs": StorageLimit(70, {})}, shared)
    offered = room(ledger, limits)
    assert offered.limit(NFS, 10) is None
    assert "storage 'nfs' is full" in str(offered.limit(NFS, 11))
    assert offered.limit(FS, 20) is None
    refusal = "global quota 'all' is full: its groups use 60 of its capacity_bytes of 80"
    assert str(offered.limit(FS, 21)) == refusal
    ledger.settle(reservation, INDEX)
    assert room(ledger, limits).limit(FS, 80) is None


async def test_limits_are_those_that_are_configured_right_now() -> None:
    registry = Registry(ClosedStorages())
    book = LimitBook(registry)
    mine = InstanceGroup(
        "mine",
        ("nfs",),
        "all",
        quota=InstanceGroupQuota(50, (QuotaConfig(StorageType.ST_NFS, 30),)),
        storage_guarantees=(StorageGuarantee("nfs", 40),),
    )
    assert book.of(mine) == Limits(mine)
    await registry.groups.create(mine)
    other = replace(mine, name="other", quota=InstanceGroupQuota(20), version=1)
    await registry.groups.create(other)
    await registry.storages.add(StorageConfig("nfs", NfsStorageSpec("/r"), capacity_bytes=100))
    await registry.storages.add(StorageConfig("free", DummyStorageSpec()))
    kept = {"mine": 30, "other": 20}
    assert book.of(mine) == Limits(mine, {"nfs": StorageLimit(100, kept)}), "a guarantee beyond the quota keeps no more"
    await registry.quotas.set(GlobalQuota("all", 60))
    assert book.of(mine).shared == SharedQuota(GlobalQuota("all", 60), ["mine", "other"])
    await registry.groups.update(replace(other, global_quota_group_name="", version=2), 1)
    assert book.of(mine).shared == SharedQuota(GlobalQuota("all", 60), ["mine"])
    assert book.of(registry.groups.get("other")).shared is None
    await registry.storages.update(StorageConfig("nfs", NfsStorageSpec("/r"), capacity_bytes=7))
    assert book.of(mine).storages["nfs"].capacity_bytes == 7
    await registry.quotas.remove("all")
    await registry.storages.update(StorageConfig("nfs", NfsStorageSpec("/r")))
    assert book.of(mine) == Limits(mine)


PLACES = [NFS, NFS2, FS]
GROUPS = ["a", "b", "c"]


Taking = Mapping[str, Counter[Place]]


def fits(limits: Limits, taken: Taking, place: Place, size: int) -> bool:
    """The rules, spelled out."""
    name, quota = limits.group.name, limits.group.quota
    own, kind = taken[name], place.storage_type
    holds = own.total() + size <= quota.capacity
    limit = quota.capacity_of(kind)
    if limit is not None:
        holds &= sum(each for where, each in own.items() if where.storage_type is kind) + size <= limit
    storage = limits.storages.get(place.storage)
    if storage is not None:
        on = {each: sum(s for where, s in taken[each].items() if where.storage == place.storage) for each in GROUPS}
        kept = sum(max(0, storage.guaranteed.get(each, 0) - on[each]) for each in GROUPS if each != name)
        holds &= sum(on.values()) + kept + size <= storage.capacity_bytes
    if limits.shared is not None:
        together = sum(taken[each].total() for each in limits.shared.group_names)
        holds &= together + size <= limits.shared.quota.capacity_bytes
    return holds


STEPS: st.SearchStrategy[Sequence[tuple[str, Place, int, int]]] = st.lists(
    st.tuples(st.sampled_from(GROUPS), st.sampled_from(PLACES), st.integers(0, 30), st.integers(0, 3)), max_size=16
)
SIZES = st.integers(0, 80)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(steps=STEPS, quotas=st.tuples(SIZES, SIZES, SIZES), on_type=SIZES, capacity=SIZES, kept=SIZES, shared=SIZES)
def test_what_fits_is_within_every_limit(
    steps: Sequence[tuple[str, Place, int, int]],
    quotas: tuple[int, int, int],
    on_type: int,
    capacity: int,
    kept: int,
    shared: int,
) -> None:
    """Whatever was let in, by plans and by others meanwhile, no limit is ever exceeded, and nothing is refused that
    fits: group, type, storage less the guarantees of others, global quota."""
    storages = {"nfs": StorageLimit(capacity, {"b": kept}), "fs": StorageLimit(2 * capacity, {})}
    quota = SharedQuota(GlobalQuota("ab", shared), ["a", "b"])
    limits = {
        name: Limits(
            replace(group(capacity=size, quotas={StorageType.ST_NFS: on_type}), name=name),
            storages,
            quota if name in quota.group_names else None,
        )
        for name, size in zip(GROUPS, quotas, strict=True)
    }
    ledger = UsageLedger()
    taken: dict[str, Counter[Place]] = {name: Counter() for name in GROUPS}
    open_reservations: list[Reservation] = []
    for name, place, size, what in steps:
        offered = room(ledger, limits[name]).limit(place, size) is None
        assert offered == fits(limits[name], taken, place, size)
        if offered:
            taken[name][place] += size
            open_reservations.append(reserve(ledger, limits[name], {place: size}))
        if what == 0 and open_reservations:  # stored
            settled = open_reservations.pop()
            ledger.listener(settled.limits.group.name, UID)()(settled.wanted_bytes, 1)
            ledger.settle(settled, INDEX)
        elif what == 1 and (used := +Counter(ledger.used(name))):  # deleted
            gone, gone_bytes = next(iter(used.items()))
            ledger.listener(name, UID)()({gone: -gone_bytes}, -1)
            taken[name][gone] -= gone_bytes
