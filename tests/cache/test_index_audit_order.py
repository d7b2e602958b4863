"""Verification of what eviction goes by: which blocks stand among those that can be evicted, what is on its way out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from struct import pack

import pytest
from audit_rig import KINDS, IndexRig, location, opened, record
from redis_servers import Standalone

from kvcm.index.backends.backend import Access
from kvcm.index.shards import shard_of
from kvcm.model.locations import BlockRecord, LocationStatus

RETIRED = 2.0**33


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    async with opened(request.param, request) as made:
        await fill(made)
        yield made


@pytest.fixture
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    async with opened("redis_standalone", request) as made:
        await fill(made)
        yield made


async def fill(rig: IndexRig) -> None:
    """One block that serves, one that is being deleted, one of which a part is."""
    await rig.configure(instances=("i",))
    going = location("going", LocationStatus.DELETING, deadline=rig.clock.now() + 30)
    part = location("part", LocationStatus.DELETING, storage="two", deadline=rig.clock.now() + 30)
    await rig.put(
        "i", {1: record(1), 2: BlockRecord(None, 0, (going,)), 3: BlockRecord(None, 0, (location("kept"), part))}
    )


def name(rig: IndexRig, kind: str, key: int) -> str:
    """The name of a key of the shard of a block."""
    assert rig.metadata.client is not None
    placement = rig.registry.instances.placement("i")
    return f"{rig.metadata.client.prefix}:{kind}{{{placement.uid}.{shard_of(key, placement.shard_count)}}}"


async def test_blocks_on_their_way_out_are_sound(rig: IndexRig) -> None:
    """Invariant 4: the sums of what is being deleted too."""
    report = await rig.verified()
    assert (report.findings, report.unsettled) == ([], [])
    backend = rig.backend("i")
    await backend.refresh()
    assert {place.storage: size for place, size in backend.deleting_bytes.items() if size} == {"one": 10, "two": 10}
    assert backend.deleting_keys == 1


async def test_a_block_on_the_wrong_side_of_the_order_is_found_and_moved(
    shared: IndexRig, redis_standalone: Standalone
) -> None:
    with redis_standalone.server.admin() as client:
        client.zadd(name(shared, "z", 1), {pack(">q", 1): RETIRED + 5.25})
        client.zadd(name(shared, "z", 2), {pack(">q", 2): 7.0})
    found = await shared.verified()
    assert sorted(each.what for each in found.findings) == [
        "the access order has it among the blocks that can be evicted",
        "the access order has it behind the blocks that can be evicted",
    ]
    assert (await shared.verified(repair=True)).is_mended
    assert (await shared.verified()).is_clean
    backend = shared.backend("i")
    assert await backend.accesses([1, 2]) == [Access(5, 1024), Access(7, 0)]
    assert await backend.coldest(10) == [(1, Access(5, 1024)), (3, Access(1000, 0))]


async def test_wrong_sums_of_what_is_being_deleted_are_found_and_recounted(
    shared: IndexRig, redis_standalone: Standalone
) -> None:
    """Invariant 4."""
    with redis_standalone.server.admin() as client:
        client.hincrby(name(shared, "u", 1), "-6/one", 7)
        client.hincrby(name(shared, "u", 1), "-", -2)
    found = await shared.verified()
    assert [each.what.partition(": ")[2] for each in found.findings] == [
        "-2 blocks that are being deleted, +7 bytes on storage 'one' (type 6) that are being deleted"
    ]
    assert (await shared.verified(repair=True)).is_mended
    assert (await shared.verified()).is_clean
    backend = shared.backend("i")
    await backend.refresh()
    assert {place.storage: size for place, size in backend.deleting_bytes.items() if size} == {"one": 10, "two": 10}
    assert backend.deleting_keys == 1


async def test_a_sum_of_an_unknown_name_is_none(shared: IndexRig, redis_standalone: Standalone) -> None:
    """Of storage types, say: it counts nothing, and a repair puts the recount beside it."""
    with redis_standalone.server.admin() as client:
        client.delete(*(name(shared, "u", key) for key in (1, 2, 3)))
        client.hset(name(shared, "u", 1), "6", 40)
    assert {each.check for each in (await shared.verified()).findings} >= {"usage"}
    assert (await shared.verified(repair=True)).is_mended
    assert (await shared.verified()).is_clean
    backend = shared.backend("i")
    await backend.refresh()
    assert {place.storage: size for place, size in backend.usage_bytes.items()} == {"one": 30, "two": 10}
