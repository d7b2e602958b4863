"""Usage of groups and storages, what a write may still take, and the hard limits of StartWriteCache."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from at_once import now
from cache_rig import Rig, TableView, group, instance, location, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.cache.manager import CacheManager
from kvcm.cache.quotas import FreeSpace, LimitCache, Limits, Reservation, SharedQuota, StorageLimit, UsageLedger
from kvcm.cache.write_sessions import StartedWrite, WriteRequest
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import CapacityError
from kvcm.model.groups import (
    GlobalQuota,
    InstanceGroup,
    InstanceGroupQuota,
    MetaIndexerConfig,
    QuotaConfig,
    StorageGuarantee,
)
from kvcm.model.keys import BlockMask
from kvcm.model.locations import BlockRecord, StorageKey
from kvcm.model.storages import DummyStorageSpec, NfsStorageSpec, StorageConfig, StorageType
from kvcm.registry.registry import Registry
from kvcm.registry.storages import ClosedStorages

# ── Free space ──


NFS = StorageKey("nfs", StorageType.ST_NFS)
NFS2 = StorageKey("nfs2", StorageType.ST_NFS)
FS = StorageKey("fs", StorageType.ST_3FS)
UID = 1


def new_index(max_key_count: int = 1 << 62) -> MetaIndex:
    return MetaIndex(MemoryBackend(), TableView(), max_key_count=max_key_count)


INDEX = new_index()


def space(ledger: UsageLedger, configured: InstanceGroup | Limits, index: MetaIndex = INDEX) -> FreeSpace:
    limits = Limits(configured) if isinstance(configured, InstanceGroup) else configured
    return now(ledger.free_space(limits, UID, index))


def reserve(
    ledger: UsageLedger,
    configured: InstanceGroup | Limits,
    wanted: Mapping[StorageKey, int],
    new_keys: int = 0,
    index: MetaIndex = INDEX,
) -> Reservation:
    limits = Limits(configured) if isinstance(configured, InstanceGroup) else configured
    reservation = Reservation("owner", limits, UID, wanted, new_keys, 0.0)
    assert now(ledger.reserve(reservation, index))
    return reservation


async def test_reserved_keys_count_until_they_end() -> None:
    """A reservation of three of five keys leaves two; one that was stored under it counts by itself afterwards."""
    ledger, configured, index = UsageLedger(), group(), new_index(max_key_count=5)
    reservation = reserve(ledger, configured, {}, 3, index)
    assert space(ledger, configured, index).free_keys == 2
    await index.read_modify_write([1], lambda _key, _old: BlockRecord(None, 0, (location("a"),)), reserved=True)
    ledger.settle(reservation, index)
    assert space(ledger, configured, index).free_keys == 4


async def test_limits_are_those_that_are_configured_right_now() -> None:
    registry = Registry(ClosedStorages())
    book = LimitCache(registry)
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


Taking = Mapping[str, Counter[StorageKey]]


def fits(limits: Limits, taken: Taking, place: StorageKey, size: int) -> bool:
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


SPACE_STEPS: st.SearchStrategy[Sequence[tuple[str, StorageKey, int, int]]] = st.lists(
    st.tuples(st.sampled_from(GROUPS), st.sampled_from(PLACES), st.integers(0, 30), st.integers(0, 3)), max_size=16
)
SIZES = st.integers(0, 80)


@settings(max_examples=examples(300))
@given(
    steps=SPACE_STEPS, quotas=st.tuples(SIZES, SIZES, SIZES), on_type=SIZES, capacity=SIZES, kept=SIZES, shared=SIZES
)
def test_what_fits_is_within_every_limit(
    steps: Sequence[tuple[str, StorageKey, int, int]],
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
    taken: dict[str, Counter[StorageKey]] = {name: Counter() for name in GROUPS}
    open_reservations: list[Reservation] = []
    for name, place, size, what in steps:
        offered = space(ledger, limits[name]).limit(place, size) is None
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


# ── Capacity limits ──


BLOCK = 20  # bytes of a block of the rig
SLOW = StorageConfig("slow", DummyStorageSpec())


def change(rig: Rig, **fields: object) -> None:
    known = rig.registry.groups.get("group")
    new: InstanceGroup = replace(known, version=known.version + 1, **fields)  # type: ignore[arg-type]
    now(rig.registry.groups.update(new, known.version))


def limit_storage(rig: Rig, blocks: int) -> None:
    now(rig.registry.storages.update(replace(SLOW, capacity_bytes=blocks * BLOCK)))


def add_group(rig: Rig, name: str, **fields: object) -> None:
    """Another group with an instance of the same name."""
    now(rig.registry.groups.create(replace(group(), name=name, **fields)))  # type: ignore[arg-type]
    now(rig.manager.register_instance(replace(instance(), instance_id=name, instance_group_name=name)))


async def start(rig: Rig, name: str, keys: Sequence[int]) -> StartedWrite:
    return await rig.manager.start_write(rig.manager.cache(name), WriteRequest(keys))


Limiter = Callable[[Rig, int], None]


def by_group(rig: Rig, blocks: int) -> None:
    change(rig, quota=InstanceGroupQuota(blocks * BLOCK))


def by_storage(rig: Rig, blocks: int) -> None:
    limit_storage(rig, blocks)
    if "slow2" in rig.registry.groups.get("group").storage_candidates:
        change(rig, storage_candidates=("slow",))


def by_global_quota(rig: Rig, blocks: int) -> None:
    now(rig.registry.quotas.set(GlobalQuota("all", blocks * BLOCK)))
    if not rig.registry.groups.get("group").global_quota_group_name:
        change(rig, global_quota_group_name="all")


def by_keys(rig: Rig, blocks: int) -> None:
    config = rig.registry.groups.get("group").cache_config
    change(rig, cache_config=replace(config, meta_indexer_config=MetaIndexerConfig(blocks)))


@pytest.mark.parametrize(
    ("limiter", "named"),
    [
        (by_group, "group 'group' is full: it uses 40 of its quota.capacity of 40"),
        (by_storage, "storage 'slow' is full: 40 of its capacity_bytes of 40"),
        (by_global_quota, "global quota 'all' is full: its groups use 40 of its capacity_bytes of 40"),
        (by_keys, "is full: it has its max_key_count of 2"),
    ],
)
async def test_a_limit_holds_from_the_next_start_on(rig: Rig, limiter: Limiter, named: str) -> None:
    """Also a limit below the current usage: the manager then rejects new blocks, and loses none."""
    await rig.store([1, 2])
    limiter(rig, 2)
    with pytest.raises(CapacityError) as refusal:
        await rig.start([1, 2, 3])
    assert named in str(refusal.value)
    limiter(rig, 4)
    started = await rig.start([1, 2, 3, 4, 5])
    assert (len(started.chunks), started.rejected) == (2, 1)
    limiter(rig, 1)
    with pytest.raises(CapacityError, match="is full"):
        await rig.start([9])
    assert (await rig.start([1, 2])).chunks == [], "a write that needs no space is never refused"


async def test_guaranteed_bytes_are_there_for_their_group_alone(rig: Rig) -> None:
    change(rig, storage_candidates=("slow",))
    add_group(rig, "kept", storage_candidates=("slow",), storage_guarantees=(StorageGuarantee("slow", 3 * BLOCK),))
    limit_storage(rig, 5)
    assert len((await rig.start(range(9))).chunks) == 2
    with pytest.raises(CapacityError, match="40 of its capacity_bytes of 100 are used and 60 more are guaranteed"):
        await rig.start([100])
    assert len((await start(rig, "kept", range(9))).chunks) == 3


async def test_a_group_that_is_gone_gives_its_guarantee_up(rig: Rig) -> None:
    change(rig, storage_candidates=("slow",))
    add_group(rig, "kept", storage_candidates=("slow",), storage_guarantees=(StorageGuarantee("slow", 3 * BLOCK),))
    await start(rig, "kept", [1])
    limit_storage(rig, 5)
    await rig.registry.groups.remove("kept")
    assert len((await rig.start(range(9))).chunks) == 4, "what it uses still counts"


async def test_refused_writes_are_counted_and_reported_by_group() -> None:
    """Wholly and partly refused ones; a write that leaves a group above a mark is reported and not counted."""
    reported: list[str] = []
    with opened(group(capacity=4 * BLOCK)) as rig:
        above = False
        manager = CacheManager(rig.registry, rig.storages, rig.clock, on_pressure=reported.append)
        manager.set_watermark_check(lambda _group: above)
        await manager.start_write(manager.cache("i"), WriteRequest([1, 2]))
        assert (reported, manager.usage.rejections) == ([], Counter())
        await manager.start_write(manager.cache("i"), WriteRequest([1, 2, 3, 4, 5]))
        assert (reported, manager.usage.rejections) == (["group"], Counter(group=1))
        with pytest.raises(CapacityError):
            await manager.start_write(manager.cache("i"), WriteRequest([6]))
        assert (reported, manager.usage.rejections) == (["group"] * 2, Counter(group=2))
        above = True
        await manager.start_write(manager.cache("i"), WriteRequest([1, 2]))
        assert len(reported) == 2, "it wrote nothing"
        change(rig, quota=InstanceGroupQuota(9 * BLOCK))
        await manager.start_write(manager.cache("i"), WriteRequest([7]))
        assert (reported, manager.usage.rejections) == (["group"] * 3, Counter(group=2))


STEPS = st.lists(
    st.tuples(st.sampled_from(["i", "b", "c"]), st.integers(0, 40), st.integers(1, 6), st.sampled_from("srrll")),
    max_size=12,
)


@settings(max_examples=examples(120))
@given(
    steps=STEPS,
    quota=st.integers(0, 12),
    capacities=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    kept=st.integers(0, 8),
    shared=st.integers(0, 15),
)
def test_no_limit_is_ever_exceeded(
    steps: list[tuple[str, int, int, str]], quota: int, capacities: tuple[int, int], kept: int, shared: int
) -> None:
    """By writers of three groups that overlap, finish and fail."""

    async def play() -> None:
        with opened(replace(group(capacity=quota * BLOCK), global_quota_group_name="all")) as rig:
            for name, blocks in zip(("slow", "slow2"), capacities, strict=True):
                await rig.registry.storages.update(
                    replace(SLOW, global_unique_name=name, capacity_bytes=blocks * BLOCK)
                )
            add_group(rig, "b", global_quota_group_name="all")
            add_group(rig, "c", storage_guarantees=(StorageGuarantee("slow", kept * BLOCK),))
            await rig.registry.quotas.set(GlobalQuota("all", shared * BLOCK))
            for name, key, count, what in steps:
                keys = range(key, key + count)
                try:
                    started = await start(rig, name, keys)
                except CapacityError:
                    continue
                finally:
                    check(rig)
                if what != "l":
                    success = BlockMask(offset=len(started.chunks) if what == "s" else 0)
                    await rig.manager.finish_write(rig.manager.cache(name), started.session.id, success)

    def check(rig: Rig) -> None:
        usage = rig.manager.usage
        totals = {name: sum(usage.used(name).values()) for name in ("group", "b", "c")}
        assert totals["group"] <= quota * BLOCK
        assert totals["group"] + totals["b"] <= shared * BLOCK
        for storage, blocks in zip(("slow", "slow2"), capacities, strict=True):
            on = usage.bytes_on_storage(storage)
            for name in totals:
                used = [size for place, size in usage.used(name).items() if place.storage == storage]
                assert on.get(name, 0) == sum(used)
            assert sum(on.values()) <= blocks * BLOCK
        others = sum(usage.bytes_on_storage("slow").get(name, 0) for name in ("group", "b"))
        assert others <= max(0, capacities[0] - kept) * BLOCK

    asyncio.run(play())
