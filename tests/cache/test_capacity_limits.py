"""Hard limits of StartWriteCache: what does not fit is refused before anything is allocated, the message names the
limit, and values that change hold for the next start."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from at_once import now
from cache_rig import Rig, group, instance, opened
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.manager import CacheManager
from kvcm.cache.sessions import StartedWrite, WriteRequest
from kvcm.model.errors import CapacityError
from kvcm.model.groups import GlobalQuota, InstanceGroup, InstanceGroupQuota, MetaIndexerConfig, StorageGuarantee
from kvcm.model.masks import BlockMask
from kvcm.model.storages import DummyStorageSpec, StorageConfig

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
    return await rig.manager.start_write(name, WriteRequest(keys))


async def test_a_full_storage_makes_way_for_the_next_and_a_full_group_for_nobody() -> None:
    with opened(group(capacity=5 * BLOCK)) as rig:
        limit_storage(rig, 2)
        started = await rig.start(range(1, 8))
        assert (len(started.chunks), started.refused) == (5, 2)
        assert "group 'group' is full" in started.refusal
        records = await rig.manager.cache("i").index.get(range(1, 6))
        assert [each.locations[0].storage for each in records if each] == ["slow"] * 2 + ["slow2"] * 3
        assert {place.storage: size for place, size in rig.manager.usage.used("group").items()} == {
            "slow": 2 * BLOCK,
            "slow2": 3 * BLOCK,
        }
        assert sum(rig.manager.usage.held_on("slow").values()) == 2 * BLOCK


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
async def test_a_limit_holds_from_the_next_start_on(limiter: Limiter, named: str) -> None:
    """Also below what is used already: then nothing more comes in, and nothing is lost."""
    with opened() as rig:
        await rig.store([1, 2])
        limiter(rig, 2)
        with pytest.raises(CapacityError) as refusal:
            await rig.start([1, 2, 3])
        assert named in str(refusal.value)
        limiter(rig, 4)
        started = await rig.start([1, 2, 3, 4, 5])
        assert (len(started.chunks), started.refused) == (2, 1)
        limiter(rig, 1)
        with pytest.raises(CapacityError, match="is full"):
            await rig.start([9])
        assert (await rig.start([1, 2])).chunks == [], "what needs no room is never refused"


async def test_what_is_guaranteed_to_a_group_is_there_for_it_alone() -> None:
    with opened() as rig:
        change(rig, storage_candidates=("slow",))
        add_group(rig, "kept", storage_candidates=("slow",), storage_guarantees=(StorageGuarantee("slow", 3 * BLOCK),))
        limit_storage(rig, 5)
        assert len((await rig.start(range(9))).chunks) == 2
        with pytest.raises(CapacityError, match="40 of its capacity_bytes of 100 are used and 60 more are guaranteed"):
            await rig.start([100])
        assert len((await start(rig, "kept", range(9))).chunks) == 3


async def test_a_group_that_is_gone_gives_its_guarantee_up() -> None:
    with opened() as rig:
        change(rig, storage_candidates=("slow",))
        add_group(rig, "kept", storage_candidates=("slow",), storage_guarantees=(StorageGuarantee("slow", 3 * BLOCK),))
        await start(rig, "kept", [1])
        limit_storage(rig, 5)
        await rig.registry.groups.remove("kept")
        assert len((await rig.start(range(9))).chunks) == 4, "what it uses still counts"


async def test_groups_of_one_name_share_a_global_quota() -> None:
    with opened() as rig:
        by_global_quota(rig, 5)
        add_group(rig, "sharer", global_quota_group_name="all")
        add_group(rig, "alone", global_quota_group_name="else")
        assert len((await rig.start([1, 2])).chunks) == 2
        assert len((await start(rig, "sharer", range(9))).chunks) == 3
        assert len((await start(rig, "alone", range(9))).chunks) == 9
        with pytest.raises(CapacityError, match="global quota 'all' is full"):
            await rig.start([3])


async def test_refused_writes_are_counted_and_told_by_group() -> None:
    """Wholly and partly refused ones; what leaves a group above a mark is told and not counted."""
    told: list[str] = []
    with opened(group(capacity=4 * BLOCK)) as rig:
        above = False
        manager = CacheManager(
            rig.registry, rig.storages, rig.clock, crossed=lambda _group: above, on_pressure=told.append
        )
        await manager.start_write("i", WriteRequest([1, 2]))
        assert (told, manager.usage.refusals) == ([], Counter())
        await manager.start_write("i", WriteRequest([1, 2, 3, 4, 5]))
        assert (told, manager.usage.refusals) == (["group"], Counter(group=1))
        with pytest.raises(CapacityError):
            await manager.start_write("i", WriteRequest([6]))
        assert (told, manager.usage.refusals) == (["group"] * 2, Counter(group=2))
        above = True
        await manager.start_write("i", WriteRequest([1, 2]))
        assert len(told) == 2, "it wrote nothing"
        change(rig, quota=InstanceGroupQuota(9 * BLOCK))
        await manager.start_write("i", WriteRequest([7]))
        assert (told, manager.usage.refusals) == (["group"] * 3, Counter(group=2))


STEPS = st.lists(
    st.tuples(st.sampled_from(["i", "b", "c"]), st.integers(0, 40), st.integers(1, 6), st.sampled_from("srrll")),
    max_size=12,
)


@settings(max_examples=120, deadline=None, derandomize=True)
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
                    await rig.manager.finish_write(name, started.session.id, success)

    def check(rig: Rig) -> None:
        usage = rig.manager.usage
        totals = {name: sum(usage.used(name).values()) for name in ("group", "b", "c")}
        assert totals["group"] <= quota * BLOCK
        assert totals["group"] + totals["b"] <= shared * BLOCK
        for storage, blocks in zip(("slow", "slow2"), capacities, strict=True):
            on = usage.held_on(storage)
            for name in totals:
                used = [size for place, size in usage.used(name).items() if place.storage == storage]
                assert on.get(name, 0) == sum(used)
            assert sum(on.values()) <= blocks * BLOCK
        others = sum(usage.held_on("slow").get(name, 0) for name in ("group", "b"))
        assert others <= max(0, capacities[0] - kept) * BLOCK

    asyncio.run(play())
